"""Quantization of weights in plain PyTorch: the reference for every quantized implementation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.kernels.int4_quantized import dequantize_groups, quantize_groups
from loraplex.kernels.int8_linear import quantize_rows
from loraplex.kernels.linear_packing import Bits


def rounded_weight(weight: Tensor, bits: Bits) -> Tensor:
    """fp32: the weight that the codes of `weight [out, in]` stand for."""
    if bits == 4:
        return dequantize_groups(*quantize_groups(weight), weight.shape[1])
    codes, scale = quantize_rows(weight)
    return codes * scale


def load_rounded(model: Path, bits: Bits) -> PreTrainedModel:
    """transformers' own fp32 model on the CPU, its decoder's matrices rounded to codes."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, module in loaded.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("_proj"):
                module.weight.copy_(rounded_weight(module.weight, bits))
    return loaded.eval()
