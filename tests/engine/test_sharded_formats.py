"""A divided base of each quantized format computes what one rank computes, within its bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model import linear_shards, sharded_base
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.whole_layers import whole_layers
from loraplex.kernels.int8_linear import Int8Linear
from loraplex.kernels.quantize import WeightFormat
from loraplex.kernels.quantized_part import part_of
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.divided_formats import cases, compare
from support.families import SERVED, save_family
from support.features import dense_logits, load_plain
from support.marks import marked_slow
from support.quantized import load_rounded
from support.ranks import run_sharded

WRONG = (Quantization.INT8, Quantization.INT4, Quantization.NF4)
QUICK = {("--quantize int8 (bytes)", 2)}
FORMATS = sorted(QUICK.union(zip(list(cases())[::4], cycle((2, 4)))))
"""`make parallel-evidence` tries all formats with 2 and 4 ranks."""


@pytest.mark.parametrize(
    "case", marked_slow(FORMATS, slow=set(FORMATS) - QUICK), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_a_mixed_batch_of_a_format_equals_one_rank(case: tuple[str, int], tmp_path: Path) -> None:
    name, size = case
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    found = compare(cases()[name], size, tmp_path)
    assert found.is_within, found


def test_ranks_that_measure_different_speeds_choose_one_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of bytes exchange other numbers than those of floats."""
    measured = iter([True, False])
    monkeypatch.setattr(sharded_base, "prefers_bytes", lambda: next(measured))
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32", quantization=Quantization.INT8)

    def forms(base: BaseModel, _rank: int) -> set[type]:
        return {type(fused.linear) for fused in base.projections}

    first, second = run_sharded(engine, 2, forms)
    assert first == second
    assert not any(issubclass(form, Int8Linear) for form in first)


def test_products_of_bytes_are_served_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of bf16 and of 8-bit inputs add up."""
    monkeypatch.setattr(sharded_base, "prefers_bytes", lambda: True)
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(
        str(model), device="cpu", dtype="bfloat16", quantization=Quantization.INT8
    )
    first, _ = run_sharded(engine, 2, lambda base, _: (base.self_test_error, base.self_test_bound))
    error, bound = first
    assert 0 < error < bound == pytest.approx(0.1)


def test_a_part_of_one_group_is_multiplied_as_the_whole_layer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 with groups is never multiplied as bytes, also if a rank has one group."""
    monkeypatch.setattr(sharded_base, "prefers_bytes", lambda: True)
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(
        str(model),
        device="cpu",
        dtype="float32",
        quantization=Quantization.INT8,
        quantization_group_size=32,
    )

    def forms(base: BaseModel, _rank: int) -> set[type]:
        return {type(fused.linear) for fused in base.projections}

    for found in run_sharded(engine, 2, forms):
        assert not any(issubclass(form, Int8Linear) for form in found)


@pytest.mark.parametrize("form", marked_slow(WRONG, slow=WRONG[1:]))
def test_a_wrong_part_is_refused_by_the_self_test(
    form: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of rounding is far below the error of inputs in another order."""

    def turned(weight: QuantizedWeight, outputs: range, inputs: range) -> QuantizedWeight | None:
        part = part_of(weight, outputs, inputs)
        assert part is not None
        return replace(part, codes=part.codes.roll(1, dims=1))

    monkeypatch.setattr(linear_shards, "part_of", turned)
    monkeypatch.setattr(sharded_base, "prefers_bytes", lambda: True)
    model = save_family(tmp_path / "base", *SERVED["llama"])
    engine = EngineConfig(str(model), device="cpu", dtype="float32", quantization=form)
    with pytest.raises(UnsupportedModel, match="paged forward differs"):
        run_sharded(engine, 2, lambda _base, _rank: None)


def test_the_reference_of_the_self_test_has_the_values_of_the_codes(tmp_path: Path) -> None:
    path = save_family(tmp_path / "base", *SERVED["llama"])
    model, rounded = load_plain(path), load_rounded(path, WeightFormat.INT4)
    tokens = [3, 17, 5, 90, 4]
    before = dense_logits(model, tokens)
    linears = {name: module for name, module in model.named_modules() if name.endswith("_proj")}
    quantization = LoadQuantization(WeightFormat.INT4)
    with whole_layers(model, linears, quantization, None, multiplies_bytes=True):
        found = dense_logits(model, tokens)
    assert (found - dense_logits(rounded, tokens)).abs().max() < 1e-4
    assert torch.equal(dense_logits(model, tokens), before)
