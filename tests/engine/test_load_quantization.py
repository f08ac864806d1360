"""The group size and the exclusions of `--quantize`, from the option to the served weights."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from loraplex.api.routes.adapter_views import base_view
from loraplex.engine.checkpoint import weights
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import InvalidParameter
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.joined_linear import JoinedLinear
from loraplex.kernels.packed_experts import PackedExperts
from loraplex.kernels.quantize import WeightFormat
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.features import dense_logits, make_world
from support.marks import marked_slow
from support.paged import paged_logits
from support.quantized import load_rounded, logit_bound, rounded_weight

SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8], list(range(40, 70))]
FEATURES: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    {"target_modules": ["k_proj", "gate_proj"], "use_dora": True},
)


SIZES = (
    (WeightFormat.INT8, 16),
    (WeightFormat.INT4, 64),  # does not divide 96 inputs
    (WeightFormat.INT4, 0),
    (WeightFormat.FP8, 48),
    (WeightFormat.NF4, 32),
)


@pytest.mark.parametrize("case", marked_slow(SIZES, slow=SIZES[2:]), ids=str)
def test_a_base_is_rounded_in_groups_of_the_size_asked_for(
    case: tuple[WeightFormat, int], tiny_base: Path
) -> None:
    form, size = case
    base = load(tiny_base, Quantization(form.value), quantization_group_size=size)
    plain = load_rounded(tiny_base, form, size)
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        expected = dense_logits(plain, tokens)
        assert (ours - expected).abs().max() < logit_bound(base) * expected.abs().max()


def test_excluded_layers_are_those_of_the_unquantized_base_and_the_others_quantized(
    tiny_base: Path,
) -> None:
    globs = ("*.down_proj", "model.layers.0.self_attn.*", "*.1.self_attn.q_proj")
    mixed = load(tiny_base, Quantization.INT4, quantization_exclude=globs)
    plain, quantized = load(tiny_base), load(tiny_base, Quantization.INT4)
    seen = {False: 0, True: 0}
    layers = zip(mixed.projections, plain.projections, quantized.projections, strict=True)
    for ours, dense, rounded in layers:
        x = torch.randn(5, ours.linear.in_features)
        columns = [part.out_features for part in ours.projection.slices]
        outputs = [each.linear(x).split(columns, dim=-1) for each in (ours, dense, rounded)]
        for part, found, *others in zip(ours.projection.slices, *outputs, strict=True):
            is_excluded = any(fnmatchcase(part.name, glob) for glob in globs)
            expected, other = others if is_excluded else reversed(others)
            assert torch.equal(found, expected), part.name
            assert not torch.equal(found, other)
            seen[is_excluded] += 1
    assert seen == {True: 2 + 4 + 1, False: 14 - 7}


@pytest.mark.parametrize(
    "case",
    marked_slow([("int4", 32), ("int8", 16), ("nf4", 16)], slow=[("int8", 16), ("nf4", 16)]),
    ids=str,
)
def test_adapters_over_groups_and_excluded_layers_equal_peft_over_their_values(
    case: tuple[str, int], tmp_path: Path
) -> None:
    form, size = case
    world = make_world(
        tmp_path,
        "qwen2",
        FEATURES,
        weight_format=WeightFormat(form),
        group_size=size,
        exclude=("*.q_proj", "*.0.mlp.up_proj", "*.1.mlp.*"),
    )
    joined = [part for part in world.base.projections if isinstance(part.linear, JoinedLinear)]
    assert len(joined) == 3, "q, k and v of both layers, and gate and up of the first"
    sequences = world.sequences()
    models = [world.plain, *world.tuned, world.plain]
    bound = max(logit_bound(world.base), 1e-4)
    for model, tokens, ours in zip(models, sequences, world.serve(sequences), strict=True):
        expected = dense_logits(model, tokens)
        assert (ours - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize(
    "family", marked_slow(["qwen3_moe", "gpt_oss-sinks-window"], slow=["gpt_oss-sinks-window"])
)
def test_excluded_experts_keep_their_values_and_the_others_are_rounded(
    family: str, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED[family])
    globs = ("*.experts.down_proj", "model.layers.0.*")
    base = load(path, Quantization.INT4, quantization_group_size=16, quantization_exclude=globs)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for index, layer in enumerate(base.moe_layers):
        experts: Any = model.get_submodule(layer.path)
        up, down = (part.weight for part in layer.experts)
        assert isinstance(down, Tensor)
        assert torch.equal(down, experts.down_proj)
        assert isinstance(up, PackedExperts) == (index > 0)
        if index == 0:
            assert isinstance(up, Tensor)
            assert torch.equal(up, experts.gate_up_proj)
    round_all_but(model, globs, size=16)
    for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True):
        expected = dense_logits(model, tokens)
        assert (ours - expected).abs().max() < logit_bound(base) * expected.abs().max()


def round_all_but(model: Any, globs: tuple[str, ...], *, size: int) -> None:
    """Round transformers' linear layers and experts to int4."""

    def is_left(path: str) -> bool:
        return any(fnmatchcase(path, glob) for glob in globs)

    with torch.no_grad():
        for path, module in model.named_modules():
            is_linear = type(module) is nn.Linear and module is not model.lm_head
            if is_linear and not is_left(path):
                module.weight.copy_(rounded_weight(module.weight, WeightFormat.INT4, size))
            elif hasattr(module, "gate_up_proj") and not is_left(f"{path}.gate_up_proj"):
                for matrix in module.gate_up_proj:
                    rows = matrix.T if module.is_transposed else matrix
                    rows.copy_(rounded_weight(rows.clone(), WeightFormat.INT4, size))


def test_the_plan_and_the_base_say_how_it_is_quantized(tiny_base: Path, tmp_path: Path) -> None:
    engine = LocalEngine(
        tiny_base,
        tmp_path,
        quantization=Quantization.INT4,
        quantization_group_size=32,
        quantization_exclude=("*.down_proj", "*.0.self_attn.o_proj"),
    )
    engine.close()
    name = "int4, groups of 32, 3 layers excluded"
    assert f"({name})" in engine.core.info.memory_plan[0]
    assert (
        base_view("base", engine.core.info, num_tokens=0, max_full_matrix_bytes=0).quantization
        == name
    )


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (LoadQuantization(), "none"),
        (LoadQuantization(WeightFormat.INT8), "int8"),
        (LoadQuantization(WeightFormat.FP8, 0), "fp8, a scale per output"),
        (LoadQuantization(WeightFormat.NF4, excluded=frozenset("a")), "nf4, 1 layer excluded"),
    ],
    ids=str,
)
def test_the_name_says_no_more_than_was_asked_for(
    quantization: LoadQuantization, name: str
) -> None:
    assert quantization.name == name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_group_size": 32}, "quantization_group_size: requires --quantize"),
        ({"quantization_exclude": ("*",)}, "quantization_exclude: requires --quantize"),
        ({"quantization": "int8", "quantization_group_size": -16}, "must be at least 0"),
        ({"quantization": "int8", "quantization_group_size": 24}, "must be a multiple of 16"),
        ({"quantization": "mxfp4", "quantization_group_size": 64}, "mxfp4 has groups of 32"),
        ({"quantization": "mxfp4", "quantization_group_size": 0}, "mxfp4 has groups of 32"),
    ],
    ids=str,
)
def test_options_that_cannot_be_applied_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        EngineConfig("base", **settings)


def test_mxfp4_takes_its_own_group_size() -> None:
    config = EngineConfig("base", quantization=Quantization.MXFP4, quantization_group_size=32)
    assert config.quantization_group_size == 32


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (("*.o_proj", "*.dwon_proj"), r"\*\.dwon_proj matches no linear layer or expert, such as"),
        (("lm_head",), "lm_head matches no linear layer or expert"),
        (("*.mlp.*", "*.self_attn.*"), "excludes every linear layer and expert"),
    ],
    ids=str,
)
def test_globs_that_cannot_be_meant_are_refused_before_a_weight_is_read(
    globs: tuple[str, ...], message: str, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_args: object) -> Tensor:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(weights._LazyTensor, "__getitem__", read)
    with pytest.raises(InvalidParameter, match=message):
        load(tiny_base, Quantization.INT4, quantization_exclude=globs)


def load(path: Path, quantization: Quantization = Quantization.NONE, **settings: Any) -> BaseModel:
    config = EngineConfig(
        str(path), device="cpu", dtype="float32", quantization=quantization, **settings
    )
    return load_base_model(config)
