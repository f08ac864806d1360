"""Bases that are quantized while they are loaded, from weights that stay in their files."""

from __future__ import annotations

import gc
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from loraplex.engine.checkpoint.weights import ModulesOf, load_config, load_weights
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model import base_model
from loraplex.engine.model.base_model import decoder_linears, replace_linears
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.linear import Linear
from loraplex.kernels.linear_packing import pack_linear
from loraplex.kernels.quantize import WeightFormat, quantize
from support.cpu_kernels import needs_cpu_library
from support.families import SERVED, save_family
from support.marks import marked_slow

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2-conv1d", "gpt_neox", "qwen3_moe", "phi3-fused")
FORMS = (Quantization.INT8, Quantization.INT4, Quantization.NF4)
CODES = list(product(FAMILIES, FORMS))
SAMPLE = {
    ("llama", Quantization.INT8),
    ("gpt2-conv1d", Quantization.INT4),
    ("gpt_neox", Quantization.INT8),
    ("qwen3_moe", Quantization.NF4),
    ("phi3-fused", Quantization.INT4),
}


@pytest.mark.parametrize("coded", marked_slow(CODES, slow=set(CODES) - SAMPLE), ids="-".join)
def test_codes_are_those_of_the_original_weights(
    coded: tuple[str, Quantization], tmp_path: Path
) -> None:
    case, form = coded
    path = save_family(tmp_path, *SERVED[case])
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = load_base_model(EngineConfig(str(path), quantization=form, device="cpu"))
    assert base.projections
    for fused in base.projections:
        originals = [dense.get_submodule(part.name) for part in fused.projection.slices]
        rows = [m.weight.T if isinstance(m, Conv1D) else m.weight for m in originals]
        biases = [m.bias for m in originals if m.bias is not None]
        expected = pack_linear(
            quantize(torch.cat(rows).detach(), WeightFormat(form)),
            torch.cat(biases).detach() if biases else None,
        )
        x = torch.randn(5, fused.linear.in_features)
        assert torch.equal(fused.linear(x), expected(x))
        assert torch.equal(fused.linear.row_norms, expected.row_norms)


@pytest.mark.parametrize("form", [Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize(("stored", "served"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_codes_are_those_of_the_weights_in_the_serving_dtype(
    stored: str, served: str, form: Quantization, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED["llama"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, stored))
    model.save_pretrained(path)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, served))
    base = load_base_model(EngineConfig(str(path), quantization=form, dtype=served, device="cpu"))
    assert base.projections
    for fused in base.projections:
        parts = [dense.get_submodule(part.name).weight for part in fused.projection.slices]
        weight = quantize(torch.cat(parts).detach(), WeightFormat(form))
        expected = pack_linear(weight, dtype=base.dtype)
        x = torch.randn(5, fused.linear.in_features)
        assert torch.equal(fused.linear(x), expected(x))


@needs_cpu_library
@pytest.mark.parametrize("case", FAMILIES)
def test_a_bf16_base_keeps_its_weights_in_bf16_when_it_is_served_in_fp32(
    case: str, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED[case])
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    dense = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = load_base_model(EngineConfig(str(path), dtype="float32", device="cpu"))
    assert base.dtype == torch.float32
    for fused in base.projections:
        assert fused.linear.weight.dtype == torch.bfloat16
        modules = [dense.get_submodule(part.name) for part in fused.projection.slices]
        weight = torch.cat([m.weight.T if isinstance(m, Conv1D) else m.weight for m in modules])
        x = torch.randn(5, fused.linear.in_features)
        torch.testing.assert_close(fused.linear.products(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert base.self_test_error < 1e-5


@pytest.mark.parametrize("case", FAMILIES)
def test_weights_left_in_their_files_are_there_during_a_forward_pass_only(
    case: str, tmp_path: Path
) -> None:
    path = save_family(tmp_path, *SERVED[case])
    config = load_config(path)
    dense = load_weights(path, config, torch.float32, CPU)
    model = load_weights(path, config, torch.float32, CPU, left_stored=decoder_linears)
    linears = decoder_linears(model).values()
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, dense(tokens).logits)
    assert all(module.weight.is_meta for module in linears)
    assert not any(parameter.is_meta for parameter in _others(model, set(linears)))


def _others(model: nn.Module, modules: set[nn.Module]) -> list[nn.Parameter]:
    return [
        parameter
        for module in model.modules()
        if module not in modules
        for parameter in module.parameters(recurse=False)
    ]


@pytest.mark.parametrize("left_stored", [None, decoder_linears], ids=["loaded", "left stored"])
def test_an_original_is_freed_before_the_next_projection_is_packed(
    left_stored: ModulesOf | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, *SERVED["llama"])
    model = load_weights(path, load_config(path), torch.float32, CPU, left_stored=left_stored)
    originals = [weakref.ref(module) for module in decoder_linears(model).values()]
    num_alive = []

    def noting(weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Linear:
        num_alive.append(sum(original() is not None for original in originals))
        return pack_linear(weight, bias, **options)

    monkeypatch.setattr(base_model, "pack_linear", noting)
    gc.disable()
    replace_linears(model, quantization=LoadQuantization(WeightFormat.INT8))
    gc.enable()
    # The largest first: gate and up of both layers, q, k and v of both, then down and o.
    assert num_alive == [14, 12, 10, 7, 4, 3, 2, 1]


def test_a_weight_that_the_loader_makes_of_others_is_loaded_at_once(tmp_path: Path) -> None:
    """Its values are nowhere in the files as they are."""
    path = save_family(tmp_path, *SERVED["llama"])
    config = load_config(path)
    dense = load_weights(path, config, torch.float32, CPU)

    def transposed(model: nn.Module) -> dict[str, nn.Module]:
        linears = decoder_linears(model)
        name = min(linears)
        weight = linears[name].weight
        assert isinstance(weight, torch.Tensor)
        linears[name].weight = nn.Parameter(weight.detach().T, requires_grad=False)
        return linears

    model = load_weights(path, config, torch.float32, CPU, left_stored=transposed)
    first = min(decoder_linears(dense))
    ours, theirs = model.get_submodule(first).weight, dense.get_submodule(first).weight
    assert torch.equal(ours, theirs)
