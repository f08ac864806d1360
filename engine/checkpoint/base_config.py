"""Checks of a base model's `config.json` that need no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CompositeBase, DamagedBase, ForeignBase, QuantizedBase
from .text_part import is_composite

CONFIG_FILE = "config.json"
_JSON_FILES = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Read when the base is loaded, if they exist."""
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of transformers and compressed-tensors."""
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""The separate files in which GPTQ, AWQ and ModelOpt describe their quantization."""
_FOREIGN_QUANTIZATION_FILES = {
    "quantization_config.json": "quantization",
    "smash_config.json": "Pruna",
}
"""Tools whose formats are not served, by their files."""
SERVED_METHODS = frozenset(
    {
        *("gptq", "awq", "compressed-tensors", "bitsandbytes"),
        *("fp8", "fbgemm_fp8", "modelopt", "mxfp4"),
    }
)
"""The formats that are served, as configurations name them."""
_PART_KEYS = frozenset(
    {
        *("text_config", "llm_config", "language_config", "thinker_config", "talker_config"),
        *("vision_config", "visual_config", "image_config", "vq_config"),
        *("audio_config", "speech_config", "audio_encoder_config", "audio_encoder"),
    }
)
"""Nested configurations: one of these shows that the model is more than a text decoder. Only that
of the text part is served."""
_OTHER_TASKS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForRewardModel",
    "RewardModel",
    "DoubleHeadsModel",
)


def read_config_file(where: Path) -> dict[str, Any]:
    """This file, or `config.json` of this folder. Raises DamagedBase unless it is a JSON object."""
    return read_json(where / CONFIG_FILE if where.is_dir() else where)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in this file. Raises DamagedBase, which names the file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as exc:
        raise DamagedBase(f"{path} is not valid JSON: {exc}; download it again") from exc
    except OSError as exc:
        raise DamagedBase(f"{path} cannot be read: {exc.strerror}") from exc
    if not isinstance(content, dict):
        raise DamagedBase(f"{path} is not a JSON object; download it again")
    return content


def check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a configuration that is quantized in a way that is not served, composite without a
    text part, or for another task.

    Raises a subclass of UnsupportedModel.
    """
    if config.get("quantization"):
        raise quantized(folder, "its config.json has MLX's quantization")
    settings = quantization_settings(config, folder)
    method = settings.get("quant_method")
    if method is not None and not (isinstance(method, str) and method in SERVED_METHODS):
        raise quantized(folder, f"its quantization method is {method}")
    parts = sorted(key for key in _PART_KEYS & config.keys() if config[key])
    if parts and not is_composite(config):
        raise CompositeBase(
            f"{folder} is a composite model ({config.get('model_type')}, with "
            f"{' and '.join(parts)}) without a text_config: give the text model alone"
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ForeignBase(
            f"{folder / CONFIG_FILE} has no model_type: give a model in the Hugging Face layout"
        )
    _check_task(config, folder)


def check_companions(folder: Path) -> None:
    """Check the small files beside `config.json`.

    Raises QuantizedBase for a quantization tool's file, DamagedBase for invalid JSON.
    """
    for name, tool in _FOREIGN_QUANTIZATION_FILES.items():
        if (folder / name).exists():
            raise quantized(folder, f"it has the {tool} file {name}")
    for name in _JSON_FILES:
        if (folder / name).exists():
            read_json(folder / name)
    for name in (CONFIG_FILE, "generation_config.json"):
        if (folder / name).exists():
            _check_end_tokens(folder / name)


def quantization_settings(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """How the base's weights are quantized, from its configuration or the quantization tool's own
    file; empty without either. Raises DamagedBase."""
    for key in _QUANTIZATION_KEYS:
        if settings := config.get(key):
            if not isinstance(settings, dict):
                raise DamagedBase(f"{folder / CONFIG_FILE}: {key} is not an object")
            return settings
    for name in _QUANTIZATION_FILES:
        if (folder / name).is_file():
            settings = read_json(folder / name)
            inner = settings.get("quantization")
            return inner if isinstance(inner, dict) else settings
    return {}


def quantized(folder: Path, reason: str) -> QuantizedBase:
    """The error for a base whose quantization is not served."""
    return QuantizedBase(
        f"{folder} is quantized in a way that is not served ({reason}): give the original "
        "checkpoint; --quantize quantizes it when it is loaded"
    )


def _check_task(config: Mapping[str, Any], folder: Path) -> None:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise DamagedBase(f"{folder / CONFIG_FILE}: architectures is not a list")
    for architecture in architectures:
        if str(architecture).endswith("ForMaskedLM"):
            raise ForeignBase(
                f"{folder} is a {architecture}, which fills in masked tokens: "
                "give a causal language model, which generates text"
            )
        if str(architecture).endswith(_OTHER_TASKS):
            raise ForeignBase(
                f"{folder} is a {architecture}, not a causal language model: "
                "give the base that it was trained from"
            )


def _check_end_tokens(path: Path) -> None:
    value = read_json(path).get("eos_token_id")
    tokens = value if isinstance(value, list) else [value]
    if not all(token is None or type(token) is int for token in tokens):
        raise DamagedBase(f"{path}: eos_token_id is {value!r}, not a token id or a list of them")
