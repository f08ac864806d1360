"""Quantized checkpoints of every format, against the weights that their writers say they hold."""

from __future__ import annotations

import gc
import json
import weakref
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.checkpoint.packed_format import find_packed_format
from loraplex.engine.checkpoint.stored_experts import StoredExperts
from loraplex.engine.checkpoint.stored_weights import StoredPackedWeight, dense, stored_weights
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.experts import experts_parameters
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.int8_linear import Int8Linear
from loraplex.kernels.joined_linear import JoinedLinear
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.families import SERVED, save_family
from support.features import Feature, dense_logits, make_world
from support.marks import marked_slow
from support.paged import paged_logits
from support.quantized import logit_bound
from support.quantized_checkpoints import (
    FORMATS,
    WEIGHTS,
    Format,
    Pack,
    gpt_oss_experts,
    gptq,
    write_checkpoint,
    write_weights,
)

CPU = torch.device("cpu")
SEQUENCES = ([5, 6, 7, 8, 9, 10, 11], [1, 2, 3])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAMPLE = ("ct-int4-asymmetric", "gptq-ordered", "nf4-nested", "deepseek-fp8")
"""Of each kind of layout one, with everything that it may have."""
SAMPLED = pytest.mark.parametrize("name", marked_slow(FORMATS, slow=FORMATS.keys() - set(SAMPLE)))


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("size", [(64, 96), (16, 64)], ids=str)
def test_the_values_are_those_that_the_writer_stored(
    form: Format, size: tuple[int, int], tmp_path: Path
) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    path, packed = write_weights(tmp_path, {"layer.weight": weight}, form)
    read = stored_weights(path)["layer.weight"]
    assert isinstance(read, StoredPackedWeight)
    assert read.shape == size
    values = dense(read.read(), dtype=torch.float32, device=CPU)
    # bitsandbytes multiplies by 1 / 127, which is rounded.
    bound = 1e-6 if form.name == "bnb-int8" else 0.0
    torch.testing.assert_close(values, packed["layer.weight"].values, rtol=bound, atol=0)
    error = (values - weight).norm() / weight.norm()
    assert error < (0.6 if form.name == "gptq-2bit" else 0.3), "it is the weight that was quantized"


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_rows_that_are_read_alone_have_the_values_that_the_writer_stored(
    form: Format, tmp_path: Path
) -> None:
    """They begin within a word of AWQ and within a block of bitsandbytes."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    path, packed = write_weights(tmp_path, {"layer.weight": weight}, form)
    read_rows = stored_weights(path)["layer.weight"].row_reader()
    for rows in (range(1), range(1, 21), range(21, 63), range(63, 64)):
        values = dense(read_rows(rows), dtype=torch.float32, device=CPU)
        expected = packed["layer.weight"].values[rows.start : rows.stop]
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


def test_rows_have_zero_points_if_any_row_has_one(tmp_path: Path) -> None:
    """The ranks of a layer have different rows and must choose one form."""
    weight = torch.zeros(16, 64)
    weight[:, ::8], weight[:, 1::8] = -8, 7
    weight[-1] += 4
    path, _ = write_weights(tmp_path, {"layer.weight": weight}, FORMATS["gptq"])
    read_rows = stored_weights(path)["layer.weight"].row_reader()
    for row in range(16):
        values = read_rows(range(row, row + 1))
        assert isinstance(values, QuantizedWeight)
        assert values.zero is not None
        assert bool(values.zero.any()) == (row == 15)
        assert torch.equal(values.dequantize(), weight[row : row + 1])


def test_blocks_as_many_as_rows_are_not_taken_for_rows(tmp_path: Path) -> None:
    weight = torch.randn(64, 1024)
    path, packed = write_weights(tmp_path, {"layer.weight": weight}, FORMATS["deepseek-fp8"])
    assert load_file(path / WEIGHTS)["layer.weight_scale_inv"].numel() == len(weight)
    values = dense(stored_weights(path)["layer.weight"].read(), dtype=torch.float32, device=CPU)
    assert torch.equal(values, packed["layer.weight"].values)


@SAMPLED
def test_a_checkpoint_gives_the_logits_of_its_values(name: str, tmp_path: Path) -> None:
    base, plain = load_both(name, "llama", tmp_path)
    assert base.quantization == find_packed_format(tmp_path / "packed")
    assert all(not isinstance(fused.linear, JoinedLinear) for fused in base.projections)
    assert_same_logits(base, plain)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "awq"),
        ("phi3-fused", "ct-int4-asymmetric"),
        pytest.param("gpt_neox", "gptq-ordered", marks=pytest.mark.slow),
        pytest.param("mixtral", "gptq", marks=pytest.mark.slow),
        pytest.param("deepseek_v3-mla", "deepseek-fp8", marks=pytest.mark.slow),
        pytest.param("gemma3-window", "ct-fp8-block", marks=pytest.mark.slow),
        pytest.param("opt", "nf4", marks=pytest.mark.slow),
    ],
)
def test_other_families_give_the_logits_of_their_values(
    family: str, name: str, tmp_path: Path
) -> None:
    base, plain = load_both(name, family, tmp_path)
    assert_same_logits(base, plain)


FEATURES: list[Feature] = [
    {"target_modules": LINEAR},
    {"target_modules": LINEAR, "use_dora": True, "r": 5},
    {"target_modules": ["embed_tokens", "lm_head", "up_proj"]},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("name", marked_slow(SAMPLE, slow=SAMPLE[1:]))
def test_adapters_over_a_checkpoint_equal_peft_over_its_values(name: str, tmp_path: Path) -> None:
    world = make_world(tmp_path, "llama", FEATURES, form=FORMATS[name])
    sequences = world.sequences()
    logits = world.serve(sequences)
    models = [world.plain, *world.tuned, world.plain]
    bound = max(logit_bound(world.base), 1e-4)
    for model, tokens, ours in zip(models, sequences, logits, strict=True):
        expected = dense_logits(model, tokens)
        assert (ours - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize(
    ("without", "num_packed"),
    [
        ("up_proj", 2),
        pytest.param("experts.2", 0, marks=pytest.mark.slow),
        pytest.param("experts.0.down_proj", 2, marks=pytest.mark.slow),
    ],
)
def test_experts_of_several_forms_become_dense(
    without: str, num_packed: int, tmp_path: Path
) -> None:
    """As where a tool left some of them as they were."""
    save_family(tmp_path / "dense", *SERVED["qwen3_moe"])
    write_checkpoint(tmp_path / "dense", tmp_path / "packed", FORMATS["gptq"], but=[without])
    base = load_base_model(EngineConfig(str(tmp_path / "packed"), device="cpu"))
    assert len(base.packed_experts) == num_packed
    assert_same_logits(base, load_plain(tmp_path / "dense"))


def test_only_the_experts_of_a_pass_are_read_before_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family(tmp_path / "dense", *SERVED["qwen3_moe"])
    path = write_checkpoint(tmp_path / "dense", tmp_path / "packed", FORMATS["awq"])
    config = load_config(path)
    model = load_weights(
        path, config, torch.float32, CPU, left_experts=lambda model: experts_parameters(model)
    )
    layers = [layer.mlp.experts for layer in model.model.layers]
    read, read_expert = [], StoredExperts.read

    def noting(stored: StoredExperts, expert: int) -> Any:
        read.append(expert)
        return read_expert(stored, expert)

    monkeypatch.setattr(StoredExperts, "read", noting)
    routed: list[int] = []
    for experts in layers:
        experts.register_forward_pre_hook(
            lambda _module, args: routed.extend(2 * args[1].unique().tolist())
        )
    tokens = torch.tensor([[5]])
    with torch.inference_mode():
        logits = model(tokens).logits
        expected = load_plain(tmp_path / "dense")(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert read == routed
    assert len(read) == 2 * 2 * 2 < 2 * 2 * 4, "two parameters of two layers, two experts of four"
    assert all(weight.is_meta for experts in layers for weight in experts.parameters())


def test_an_experts_matrix_is_freed_before_the_next_but_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, *SERVED["mixtral"])
    alive: list[weakref.ref[Tensor]] = []
    num_alive = []
    read = StoredExperts.read

    def noting(stored: StoredExperts, expert: int) -> Any:
        num_alive.append(sum(matrix() is not None for matrix in alive))
        values = read(stored, expert)
        assert isinstance(values, Tensor)
        alive.append(weakref.ref(values))
        return values

    monkeypatch.setattr(StoredExperts, "read", noting)
    gc.disable()
    base = load_base_model(EngineConfig(str(path), device="cpu", quantization=Quantization.INT4))
    gc.enable()
    assert len(base.packed_experts) == 4
    assert max(num_alive) == 1


def test_siblings_of_other_forms_are_multiplied_one_by_one(tmp_path: Path) -> None:
    def pack(weight: Tensor) -> Any:
        return gptq(weight, bits=8 if weight.shape[0] == 32 else 4)

    save_family(tmp_path / "dense", *SERVED["qwen2"])
    form = replace_pack(FORMATS["gptq"], pack)
    write_checkpoint(tmp_path / "dense", tmp_path / "packed", form, but=("gate_proj",))
    base = load_base_model(EngineConfig(str(tmp_path / "packed"), device="cpu"))
    joined = [part for part in base.projections if isinstance(part.linear, JoinedLinear)]
    assert {part.projection.slices[-1].name.rpartition(".")[2] for part in joined} == {
        "v_proj",
        "up_proj",
    }
    assert_same_logits(base, load_plain(tmp_path / "dense"))


def test_groups_of_different_sizes_keep_their_values(tmp_path: Path) -> None:
    weight = torch.randn(16, 64)
    path, written = write_weights(tmp_path, {"layer.weight": weight}, FORMATS["gptq-symmetric"])
    tensors = load_file(path / WEIGHTS)
    groups, scales = tensors["layer.g_idx"].long(), tensors["layer.scales"].float()
    codes = written["layer.weight"].values / scales[groups].T
    groups[:3] = groups[-1]
    tensors["layer.g_idx"] = groups.int()
    save_file(tensors, path / WEIGHTS)
    scale = scales[groups].T
    values = stored_weights(path)["layer.weight"].read()
    assert isinstance(values, Tensor)
    torch.testing.assert_close(values, codes.round() * scale)


def test_stacked_mxfp4_experts_give_the_logits_of_their_values(tmp_path: Path) -> None:
    """gpt-oss: [experts, out, in / 32, 16] bytes, and an exponent for each 32 inputs."""
    save_family(tmp_path / "dense", *SERVED["gpt_oss-sinks-window"])
    gpt_oss_experts(tmp_path / "dense", tmp_path / "packed")
    base = load_base_model(EngineConfig(str(tmp_path / "packed"), device="cpu"))
    assert base.quantization == "mxfp4"
    assert len(base.packed_experts) == 4
    for experts in base.packed_experts:
        assert experts.weight_bytes <= 0.30 * 2 * prod(experts.shape)
    assert_same_logits(base, load_plain(tmp_path / "dense"))


def test_an_int8_checkpoint_is_multiplied_as_bytes_where_the_processor_does_so_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.kernels.linear_packing.prefers_bytes", lambda: True)
    base, plain = load_both("ct-w8a8", "llama", tmp_path)
    assert has_int8(base)
    assert_same_logits(base, plain)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    save_family(tmp_path / "dense", *SERVED["llama"])
    path = write_checkpoint(tmp_path / "dense", tmp_path / "packed", FORMATS["gptq"])
    config = EngineConfig(str(path), device="cpu", quantization=Quantization.INT8)
    with pytest.raises(InvalidParameter, match="quantized already: gptq-int4"):
        load_base_model(config)


def test_the_settings_may_be_in_the_tools_own_file(tmp_path: Path) -> None:
    save_family(tmp_path / "dense", *SERVED["llama"])
    form = FORMATS["gptq-v2"]
    path = write_checkpoint(tmp_path / "dense", tmp_path / "packed", form)
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    (path / "quantize_config.json").write_text(json.dumps(settings))
    base = load_base_model(EngineConfig(str(path), device="cpu"))
    assert_same_logits(base, load_plain(tmp_path / "dense"))


def load_both(name: str, family: str, tmp_path: Path) -> tuple[BaseModel, Any]:
    """The base of a quantized checkpoint, and transformers' model of its values."""
    save_family(tmp_path / "dense", *SERVED[family])
    path = write_checkpoint(tmp_path / "dense", tmp_path / "packed", FORMATS[name])
    return load_base_model(EngineConfig(str(path), device="cpu")), load_plain(tmp_path / "dense")


def load_plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def assert_same_logits(base: BaseModel, plain: Any) -> None:
    bound = logit_bound(base)
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        expected = dense_logits(plain, tokens)
        assert (ours - expected).abs().max() < bound * expected.abs().max()


def has_int8(base: BaseModel) -> bool:
    return any(isinstance(fused.linear, Int8Linear) for fused in base.projections)


def replace_pack(form: Format, pack: Pack) -> Format:
    return form._replace(pack=pack)
