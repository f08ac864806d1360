"""Small bases in every quantized form, each with a dense copy of the values that it holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.engine.checkpoint.files import locate_base
from loraplex.engine.config import Quantization
from loraplex.kernels.quantize import WeightFormat
from support.features import change_weights
from support.quantized import rounded_weight
from support.quantized_checkpoints import FORMATS, SHARED_GATE, is_quantized, write_checkpoint

_READ = ".dt_proj.weight"
"""Of Mamba's module, which reads this layer's weight instead of calling the layer."""
_GGUF_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
}
_GGUF_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
"""The same of a model with experts."""
_GGUF_KINDS: dict[str, Callable[[str], str]] = {
    "gguf-q4_k_m": lambda name: "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K",
    "gguf-q8_0": lambda _name: "Q8_0",
}


class QuantizedBase(NamedTuple):
    """One base in two folders."""

    served: Path
    plain: Path
    """A dense checkpoint of the same values."""
    quantization: Quantization = Quantization.NONE
    """What the served one is loaded with."""


Maker = Callable[[Path, Path], QuantizedBase]
"""Of a dense model, whose values are changed to those that are held, and a folder to write in."""


def makers() -> dict[str, Maker]:
    """One of each way to have a quantized base: by checkpoint, while loading, and by GGUF file."""
    made: dict[str, Maker] = {name: _from_checkpoint(name) for name in FORMATS}
    made |= {f"--quantize {form}": _while_loading(form) for form in WeightFormat}
    return made | {name: _from_gguf(kind_of) for name, kind_of in _GGUF_KINDS.items()}


def _from_checkpoint(name: str) -> Maker:
    def make(dense: Path, folder: Path) -> QuantizedBase:
        return QuantizedBase(write_checkpoint(dense, folder, FORMATS[name]), dense)

    return make


def _while_loading(form: WeightFormat) -> Maker:
    def leave_codes(name: str, parameter: torch.Tensor) -> None:
        is_linear = is_quantized(name, parameter) or name.endswith(SHARED_GATE)
        if is_linear and not name.endswith(_READ):
            parameter.copy_(rounded_weight(parameter, form))
        if ".experts." in name and parameter.ndim == 3:
            for matrix in parameter:
                matrix.copy_(rounded_weight(matrix, form))

    def make(dense: Path, folder: Path) -> QuantizedBase:
        change_weights(dense, leave_codes)
        return QuantizedBase(dense, dense, Quantization(form))

    return make


def _write_experts(writer: Any, config: Any) -> None:
    """The numbers of a model's experts, if it has any."""
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _from_gguf(kind_of: Callable[[str], str]) -> Maker:
    def make(dense: Path, folder: Path) -> QuantizedBase:
        """The dense model is another one, whose rows are whole blocks."""
        from support.gguf_files import TOKENS, write_model

        config = AutoConfig.from_pretrained(dense)
        config.update({**_GGUF_SIZES, "vocab_size": len(TOKENS)})
        config.update({name: size for name, size in _GGUF_EXPERTS.items() if hasattr(config, name)})
        folder.mkdir(parents=True)
        file = folder / "base.gguf"
        architecture = config.model_type.replace("_", "")
        values = write_model(
            file,
            config,
            architecture,
            kind_of=kind_of,
            settings=lambda writer: _write_experts(writer, config),
        )
        model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(values, strict=not config.tie_word_embeddings)
        model.tie_weights()
        model.save_pretrained(dense)
        for path in locate_base(str(file)).glob("token*"):
            shutil.copy(path, dense)
        return QuantizedBase(file, dense)

    return make
