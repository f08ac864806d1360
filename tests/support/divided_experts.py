"""Quantized experts and quantized latent attention in every format, to be divided among ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.engine.config import Quantization
from support.divided_formats import Case
from support.families import SERVED, save_family
from support.quantized_bases import QuantizedBase, makers
from support.quantized_checkpoints import gpt_oss_experts

EXPERTS = "qwen3_moe"
"""Every format of linear layers is tried with the experts of this family."""
GPT_OSS = "gpt_oss-sinks-window"
"""Its experts have biases, and are stacked and transposed in its files."""
OTHERS = {
    GPT_OSS: ("--quantize int4", "--quantize mxfp4"),
    "mixtral": ("gptq", "--quantize int8"),
    "qwen2_moe-window": ("awq", "gguf-q8_0"),
    "llama4-chunks": ("--quantize nf4",),
    "granitemoe": ("--quantize int4",),
    "deepseek_v2-mla": (
        *("gptq", "gptq-ordered", "awq", "ct-int4-asymmetric", "ct-fp8-block", "nf4", "ct-mxfp4"),
        *("--quantize int4", "--quantize int8", "--quantize fp8"),
    ),
    "deepseek_v3-lora": ("deepseek-fp8", "gptq", "--quantize nf4"),
}
"""Other ways in which experts are stored, and latent attention."""
LORA_QUERIES: tuple[str, dict[str, Any]] = (
    "deepseek_v3",
    {**SERVED["deepseek_v3-mla"][1], "q_lora_rank": 32},
)
"""Latent attention whose queries have a latent too, as those of DeepSeek-V3."""


def expert_cases() -> dict[str, Case]:
    """By the family and the format."""
    formats = makers()
    names = [(EXPERTS, name) for name in formats]
    names += [(family, name) for family, chosen in OTHERS.items() for name in chosen]
    made = [Case(f"{family}: {name}", formats[name], save=_save(family)) for family, name in names]
    made += [
        Case(f"{GPT_OSS}: mxfp4", _mxfp4, save=_save(GPT_OSS)),
        Case(
            f"{EXPERTS}: --quantize int4 without one layer's",
            _unquantized,
            {
                "quantization": Quantization.INT4,
                "quantization_exclude": ("model.layers.1.mlp.experts.*",),
            },
            save=_save(EXPERTS),
        ),
        Case(
            f"{EXPERTS}: --quantize int8 (bytes)",
            formats["--quantize int8"],
            multiplies_bytes=True,
            save=_save(EXPERTS),
        ),
    ]
    return {case.name: case for case in made}


def _save(family: str) -> Callable[[Path], object]:
    shape = LORA_QUERIES if family == "deepseek_v3-lora" else SERVED[family]
    return partial(save_family, model_type=shape[0], differences=shape[1])


def _mxfp4(dense: Path, folder: Path) -> QuantizedBase:
    return QuantizedBase(gpt_oss_experts(dense, folder), dense)


def _unquantized(dense: Path, _folder: Path) -> QuantizedBase:
    return QuantizedBase(dense, dense)
