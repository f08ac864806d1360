"""The base that is trained has the values that are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model.admission import run_paged
from loraplex.engine.model.parity_bound import (
    BYTE_INPUTS_TOLERANCE,
    ROUNDED_INPUTS_TOLERANCE,
    SELF_TEST_TOLERANCE,
)
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.tuning.base import load_tunable_base
from loraplex.engine.tuning.errors import BaseNotTunable
from loraplex.engine.tuning.frozen_linear import FrozenLinear
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.families import EXPERTS, save_family
from support.models import make_tiny_llama

TOKENS = [5, 9, 200, 31, 77, 12, 240, 8]


def trained_logits(engine: EngineConfig) -> torch.Tensor:
    """fp32 `[positions, tokens]`."""
    model: Any = load_tunable_base(engine).model
    logits: torch.Tensor = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits.float()


@pytest.mark.parametrize(
    ("quantization", "bound"),
    [
        (Quantization.NONE, SELF_TEST_TOLERANCE[torch.float32]),
        (Quantization.INT4, ROUNDED_INPUTS_TOLERANCE),
        # The engine rounds the inputs of these layers to bytes, which training does not.
        (Quantization.INT8, BYTE_INPUTS_TOLERANCE),
    ],
)
def test_the_logits_are_those_of_the_engine(
    tmp_path: Path, quantization: Quantization, bound: float
) -> None:
    engine = EngineConfig(
        str(make_tiny_llama(tmp_path)), device="cpu", dtype="float32", quantization=quantization
    )
    served = load_base_model(engine)
    (expected,) = run_paged(served.model, served.kv_shapes, [TOKENS], served.kv_format)
    error = ((trained_logits(engine) - expected).abs().max() / expected.abs().max()).item()
    print(f"{quantization}: error {error:.2g}, bound {bound:.2g}")  # noqa: T201
    assert error <= bound
    if quantization is not Quantization.NONE:
        plain = trained_logits(EngineConfig(engine.model, device="cpu", dtype="float32"))
        assert not torch.allclose(plain, trained_logits(engine), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_the_gradient_is_that_of_a_dense_layer_of_the_same_values(
    weight_format: WeightFormat,
) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(48, 96), weight_format)
    bias = torch.randn(48)
    x, grad = torch.randn(3, 5, 96), torch.randn(3, 5, 48)
    own, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = FrozenLinear(weight, bias, torch.float32)(own)
    expected = torch.nn.functional.linear(reference, weight.dequantize(), bias)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(own.grad, reference.grad)


def test_a_quantized_base_keeps_codes_and_no_dense_weights(tmp_path: Path) -> None:
    base = load_tunable_base(
        EngineConfig(
            str(make_tiny_llama(tmp_path)),
            device="cpu",
            dtype="float32",
            quantization=Quantization.INT8,
        )
    )
    layers = [base.model.get_submodule(path) for path in sorted(base.linears)]
    assert len(layers) == 14
    assert all(isinstance(layer, FrozenLinear) for layer in layers)
    assert all(isinstance(layer.__dict__["_values"], QuantizedWeight) for layer in layers)
    assert not any(list(layer.parameters()) for layer in layers)
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_a_base_with_quantized_experts_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "mixtral", EXPERTS)
    with pytest.raises(BaseNotTunable, match="quantized experts"):
        load_tunable_base(
            EngineConfig(
                str(tmp_path), device="cpu", dtype="float32", quantization=Quantization.INT8
            )
        )


def test_a_folder_without_a_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BaseNotTunable, match="cannot be loaded"):
        load_tunable_base(EngineConfig(str(tmp_path), device="cpu"))
