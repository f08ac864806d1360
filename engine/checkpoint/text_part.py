"""The text part of a composite checkpoint, such as one for text and images.

Its configuration is nested, and its tensors have names of their own beside those of the other
parts, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...adapters.whole_model_names import own_name
from ..errors import CompositeBase, DamagedBase

T = TypeVar("T")
TEXT_CONFIG = "text_config"
_OUTPUT_HEAD = "lm_head."
"""The whole model has the text part's output head under its name there, or under this one."""
_SHARED_SETTINGS = (
    *("dtype", "torch_dtype", "num_nextn_predict_layers"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Settings that may be given for all parts together."""


def is_composite(config: Mapping[str, Any]) -> bool:
    """Whether this configuration is that of a composite model with a text part."""
    return isinstance(config.get(TEXT_CONFIG), dict)


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a composite model's text part; of another model, its own."""
    if not is_composite(config):
        return dict(config)
    shared = {name: config[name] for name in _SHARED_SETTINGS if name in config}
    return {**shared, **config[TEXT_CONFIG]}


def text_name(name: str) -> str | None:
    """The name of a composite checkpoint's tensor or module in its text part; None: it belongs to
    another part."""
    own = own_name(name)
    return own if own != name or name.startswith(_OUTPUT_HEAD) else None


def of_text_part(tensors: Mapping[str, T], config: Mapping[str, Any], folder: Path) -> dict[str, T]:
    """The tensors of a composite checkpoint's text part by their names there; all of another
    checkpoint. Raises CompositeBase if none belong to it, and DamagedBase if two have one name."""
    if not is_composite(config):
        return dict(tensors)
    found: dict[str, T] = {}
    for name, tensor in tensors.items():
        own = text_name(name)
        if own in found:
            raise DamagedBase(
                f"{folder}: {own} of the text part is in its files under two names, one of them "
                f"{name}: give the weights of one model"
            )
        if own is not None:
            found[own] = tensor
    if not any(name.startswith("model.") for name in found):
        raise CompositeBase(
            f"{folder} is a composite model ({config.get('model_type')}) whose files do not name "
            "the tensors of its text part language_model: give the text model alone"
        )
    return found
