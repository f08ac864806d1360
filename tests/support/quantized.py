"""Quantization of weights in plain PyTorch: the reference for every quantized implementation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.kernels.quantize import WeightFormat, quantize


def rounded_weight(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    """fp32: the weight that the codes of `weight [out, in]` stand for."""
    return quantize(weight, weight_format).dequantize()


def load_rounded(model: Path, weight_format: WeightFormat) -> PreTrainedModel:
    """transformers' own fp32 model on the CPU, its decoder's matrices rounded to codes."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, module in loaded.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("_proj"):
                module.weight.copy_(rounded_weight(module.weight, weight_format))
    return loaded.eval()
