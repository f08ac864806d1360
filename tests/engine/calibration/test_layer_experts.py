"""Experts in quantized checkpoints: their codes, their hessians, and what stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from loraplex.engine.calibration.gptq import quantize_gptq
from loraplex.engine.calibration.grid import GRIDS, round_to_nearest
from loraplex.engine.calibration.layer_experts import LayerExperts, find_layer_experts
from loraplex.engine.calibration.method import Method
from loraplex.engine.calibration.quantization import Outcome
from loraplex.engine.checkpoint.stored_weights import StoredPackedWeight, dense, stored_weights
from loraplex.engine.checkpoint.weights import load_config, load_weights
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.model.experts import experts_parameters
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from support.calibration import (
    CPU,
    GROUP,
    Interrupted,
    assert_served_as_its_values,
    differing,
    interrupt_after_the_first,
    quantize_small,
    save_with_tokenizer,
    with_values_of,
)
from support.marks import marked_slow

INT4 = GRIDS[CodeType.INT4]
EXCLUDED = ("*.layers.1.*.experts.2.*", "*.layers.0.*.w2")
FIRST = "model.layers.0.block_sparse_moe.experts"
SECOND = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("model"), "mixtral")


@pytest.fixture(scope="module")
def nearest(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """Without some of the experts' matrices."""
    out = tmp_path_factory.mktemp("nearest") / "out"
    return out, quantize_small(mixtral, out, method=Method.RTN, exclude=EXCLUDED)


def is_excluded(path: str) -> bool:
    return path.startswith(f"{SECOND}.2.") or (path.startswith(FIRST) and path.endswith(".w2"))


def test_each_expert_has_its_nearest_codes_under_the_names_of_the_original(
    mixtral: Path, nearest: tuple[Path, Outcome]
) -> None:
    original, written = load_file(mixtral / "model.safetensors"), stored_weights(nearest[0])
    assert written.keys() == original.keys()
    experts = [name for name in original if ".experts." in name]
    assert len(experts) == 24
    for name in experts:
        values = dense(written[name].read(), dtype=torch.float32, device=CPU)
        if is_excluded(name.removesuffix(".weight")):
            assert torch.equal(values, original[name])
            continue
        assert isinstance(written[name], StoredPackedWeight)
        groups = original[name].unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(dim=2, keepdim=True) / 7.5
        expected = (groups / scale).round().clamp(-8, 7) * scale
        torch.testing.assert_close(values, expected.flatten(1))


def test_experts_that_stay_as_they_are_and_routers_are_listed(
    nearest: tuple[Path, Outcome],
) -> None:
    out, outcome = nearest
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(ignored) == sorted(
        [
            "lm_head",
            *(f"model.layers.{layer}.block_sparse_moe.gate" for layer in (0, 1)),
            *(f"{FIRST}.{expert}.w2" for expert in range(4)),
            *(f"{SECOND}.2.{matrix}" for matrix in ("w1", "w2", "w3")),
        ]
    )
    assert (outcome.num_quantized, outcome.num_in_experts) == (8 + 24 - 7, 24 - 7)


@pytest.mark.parametrize(
    "family",
    marked_slow(
        ("mixtral", "qwen3_moe", "deepseek_v2-mla", "olmoe"),
        slow=("qwen3_moe", "deepseek_v2-mla", "olmoe"),
    ),
)
def test_quantized_experts_are_served_with_the_logits_of_their_values(
    family: str, tmp_path: Path
) -> None:
    model, out = save_with_tokenizer(tmp_path / "model", family), tmp_path / "out"
    outcome = quantize_small(model, out, method=Method.RTN, group_size=16)
    names = {name for name in load_file(model / "model.safetensors") if ".experts." in name}
    packed = {n for n, w in stored_weights(out).items() if isinstance(w, StoredPackedWeight)}
    assert names
    assert names <= packed
    assert outcome.num_in_experts == len(names)
    assert_served_as_its_values(out, model, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_transformers_reads_the_same_values_of_experts(family: str, tmp_path: Path) -> None:
    model, out = save_with_tokenizer(tmp_path / "model", family), tmp_path / "out"
    quantize_small(model, out, method=Method.RTN, group_size=16)
    read = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(
        with_values_of(out, model, tmp_path / "plain"), dtype=torch.float32
    ).state_dict()
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


@pytest.mark.slow
def test_gptq_changes_the_outputs_of_moe_layers_less_than_the_nearest_codes(
    mixtral: Path, tmp_path: Path
) -> None:
    gptq = quantize_small(mixtral, tmp_path / "gptq", exclude=("*.self_attn.*",))
    plain = quantize_small(mixtral, tmp_path / "rtn", exclude=("*.self_attn.*",), method=Method.RTN)
    assert gptq.num_in_experts == gptq.num_quantized == 24
    assert all(gptq.errors[layer] < plain.errors[layer] for layer in (0, 1))
    assert gptq.quality.divergence < plain.quality.divergence
    assert gptq.num_bytes == plain.num_bytes < gptq.original_bytes


@pytest.mark.slow
@pytest.mark.parametrize("method", list(Method))
def test_an_interrupted_run_with_experts_is_continued_to_the_same_bytes(
    method: Method, mixtral: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    outcome = quantize_small(mixtral, whole, method=method, exclude=EXCLUDED)
    with pytest.raises(Interrupted):
        quantize_small(
            mixtral, out, method=method, exclude=EXCLUDED, on_layer=interrupt_after_the_first
        )
    finished: list[tuple[int, int]] = []
    continued = quantize_small(
        mixtral,
        out,
        method=method,
        exclude=EXCLUDED,
        on_matrices=lambda done, count: finished.append((done, count)),
    )
    assert continued == outcome
    assert differing(out, whole) == []
    assert finished == [(12, 25), *((done, 25) for done in range(13, 26))]


@pytest.mark.slow
def test_experts_in_one_tensor_stay_as_they_are(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", "gpt_oss-sinks-window")
    out = tmp_path / "out"
    outcome = quantize_small(model, out)
    assert outcome.num_in_experts == 0
    assert r"re:.*\.experts(\..*)?$" in outcome.ignored
    written = stored_weights(out)
    for name, tensor in load_file(model / "model.safetensors").items():
        if ".experts." in name:
            assert torch.equal(dense(written[name].read(), dtype=tensor.dtype, device=CPU), tensor)


def test_a_group_has_to_divide_the_inputs_of_experts_too(tmp_path: Path) -> None:
    model = save_with_tokenizer(tmp_path / "model", "qwen3_moe")
    with pytest.raises(
        InvalidParameter, match=r"32 does not divide the 48 inputs of .*\.experts\.0\.down_proj"
    ):
        quantize_small(model, tmp_path / "out")


@pytest.fixture
def experts(mixtral: Path) -> Iterator[tuple[LayerExperts, Any]]:
    """Those of the first layer, and the module."""
    model: Any = load_weights(
        mixtral, load_config(mixtral), torch.float32, CPU, left_experts=experts_parameters
    )
    found = find_layer_experts(model)[0]
    with found.in_memory():
        yield found, model.get_submodule(found.path)


def correlated(count: int, seed: int) -> Tensor:
    """Inputs `[count, 64]` as layers have them: a few directions are much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    sizes = torch.logspace(0, -2, 64)
    return torch.randn(count, 64, generator=generator) * sizes @ directions


def watch(experts: LayerExperts, module: Any, x: Tensor, chosen: Tensor) -> None:
    with experts.watching():
        module(x, chosen, torch.full(chosen.shape, 0.5))


def test_an_expert_has_the_hessian_of_its_tokens_and_a_little_of_all(
    experts: tuple[LayerExperts, Any],
) -> None:
    own, module = experts
    x = correlated(40, seed=1)
    chosen = torch.stack([torch.arange(40) % 3, torch.full((40,), 3)], dim=1)
    first, second = module.gate_up_proj.clone(), module.down_proj.clone()
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(weight: Tensor, hessian: Tensor | None) -> QuantizedWeight:
        assert hessian is not None
        seen.append((weight.clone(), hessian))
        return round_to_nearest(weight, INT4, group=GROUP, dtype=torch.float32)

    watch(own, module, x, chosen)
    list(own.quantize(own.matrices.keys(), keep))
    for expert in range(4):
        is_own = [expert in row for row in chosen.tolist()]
        gate, up = (x @ first[expert].T).chunk(2, dim=1)
        for given, weight, (own_weight, hessian) in zip(
            (x, F.silu(gate) * up),
            (first[expert], second[expert]),
            seen[2 * expert : 2 * expert + 2],
            strict=True,
        ):
            assert torch.equal(own_weight, weight)
            share = given.shape[1] / 4 / 40
            expected = sum(
                torch.outer(row, row) * (share + is_routed)
                for row, is_routed in zip(given.double(), is_own, strict=True)
            )
            torch.testing.assert_close(hessian.double(), expected, rtol=1e-4, atol=1e-3)


def test_an_expert_without_tokens_is_rounded_for_those_of_the_others(
    experts: tuple[LayerExperts, Any],
) -> None:
    own, module = experts
    original = module.gate_up_proj[3].clone()
    watch(own, module, correlated(400, seed=1), torch.arange(400)[:, None] % 3)

    def gptq(weight: Tensor, hessian: Tensor | None) -> QuantizedWeight:
        assert hessian is not None
        return quantize_gptq(
            weight, hessian, INT4, group=GROUP, dtype=torch.float32, act_order=True
        )

    paths = {path for path in own.matrices if path.startswith(f"{FIRST}.3.w")}
    written = dict(own.quantize(paths, gptq))
    assert written.keys() == paths
    later = correlated(200, seed=2)
    plain = round_to_nearest(original, INT4, group=GROUP, dtype=torch.float32).dequantize()

    def error(weight: Tensor) -> float:
        return float((later @ (weight - original).T).norm())

    assert error(module.gate_up_proj[3]) < 0.7 * error(plain)


def test_experts_are_in_memory_until_their_layer_is_left(mixtral: Path) -> None:
    model: Any = load_weights(
        mixtral, load_config(mixtral), torch.float32, CPU, left_experts=experts_parameters
    )
    experts = find_layer_experts(model)[0]
    module = model.get_submodule(experts.path)
    x, chosen = correlated(3, seed=1), torch.tensor([[0, 1], [2, 1], [0, 2]])
    expected = module(x, chosen, torch.full(chosen.shape, 0.5))
    with experts.in_memory():
        assert torch.equal(module(x, chosen, torch.full(chosen.shape, 0.5)), expected)
        module.down_proj.zero_()
        assert not module(x, chosen, torch.full(chosen.shape, 0.5)).any()
    assert module.down_proj.is_meta
    assert torch.equal(module(x, chosen, torch.full(chosen.shape, 0.5)), expected)
