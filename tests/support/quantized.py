"""Quantization of weights in plain PyTorch: the reference for every quantized implementation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.model.base_model import BaseModel
from loraplex.kernels.int8_linear import Int8Linear, quantize_rows
from loraplex.kernels.packed_experts_cpu import PanelExperts
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_linear_cpu import QuantizedPanelLinear


def rounded_weight(
    weight: Tensor, weight_format: WeightFormat, group_size: int | None = None
) -> Tensor:
    """fp32: the weight that the codes of `weight [out, in]` stand for."""
    return quantize(weight, weight_format, group_size).dequantize()


def load_rounded(
    model: Path, weight_format: WeightFormat, group_size: int | None = None
) -> PreTrainedModel:
    """transformers' own fp32 model on the CPU, its decoder's matrices rounded to codes."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, module in loaded.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("_proj"):
                module.weight.copy_(rounded_weight(module.weight, weight_format, group_size))
    return loaded.eval()


def round_inputs(model: nn.Module, base: BaseModel) -> None:
    """Round the inputs of those of the model's linear layers that `base` computes as products of
    bytes: through a router they change a logit by more than any bound allows."""
    names = {
        part.name
        for fused in base.projections
        if any(isinstance(linear, Int8Linear) for linear in fused.linear.modules())
        for part in fused.projection.slices
    }
    for path, module in model.named_modules():
        name = path.removeprefix("base_model.model.").removesuffix(".base_layer")
        if name in names and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_round_input)


def _round_input(_layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    codes, scale = quantize_rows(inputs[0])
    return (codes * scale,)


def logit_bound(base: BaseModel) -> float:
    """The largest error of a served base in fp32, relative to the largest logit.

    Inputs have 8 bits in products of bytes, 16 bits in those of int8 and int4 codes (decision 55).
    """
    parts = [part for fused in base.projections for part in fused.linear.modules()]
    if any(isinstance(part, Int8Linear) for part in parts):
        return 0.05
    parts += [*base.packed_experts, *base.packed_ends.linears]
    rounds = any(
        isinstance(part, QuantizedPanelLinear | PanelExperts) and part.rounds_inputs
        for part in parts
    )
    return 1e-3 if rounds else 1e-5
