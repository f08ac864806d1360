"""A folder that PEFT's `save_pretrained` wrote: what is in it, before it is examined."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...adapters.added_tokens import FIELD as ADDED_TOKENS
from .trained_labels import with_labels
from .trained_tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TokenFields, read_added_tokens

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_CONFIG_FILE = "config.json"
ADAPTER_FILES = (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    MODEL_CONFIG_FILE,
)
"""All that is read."""
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


class FolderUnusable(Exception):
    """There is no adapter to examine in the folder; the message says the way out."""

    def __init__(self, code: str, message: str) -> None:
        """`code`: a published one."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The parts of an adapter that a push sends."""

    config: dict[str, Any]
    weights: Path
    tokens: list[TokenFields]
    """Those that the tokenizer beside it lists as added, the base's too."""

    def config_for(self, num_base_tokens: int) -> dict[str, Any]:
        """The configuration with the tokens that a base does not have."""
        own = [token for token in self.tokens if _is_beyond(token["id"], num_base_tokens)]
        return {ADDED_TOKENS: own, **self.config} if own else self.config


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Read everything but the weights. Raises FolderUnusable."""
    weights = folder / WEIGHTS_FILE
    if not folder.is_dir():
        raise _unusable(f"{folder} is not a folder. Give the one that save_pretrained wrote.")
    if not weights.is_file():
        raise missing_weights(str(folder), os.listdir(folder))
    return AdapterFolder(_read_config(folder), weights, read_added_tokens(folder))


def _is_beyond(token_id: object, num_tokens: int) -> bool:
    return isinstance(token_id, int) and token_id >= num_tokens


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(config, ensure_ascii=False, allow_nan=False).encode()  # as it will be sent
    except FileNotFoundError:
        raise _unusable(
            f"{folder} has no {CONFIG_FILE}: give the folder that save_pretrained wrote."
        ) from None
    except (ValueError, RecursionError) as exc:
        raise FolderUnusable("malformed_config", f"{path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise FolderUnusable("malformed_config", f"{path} is not a JSON object.")
    return with_labels(config, folder / MODEL_CONFIG_FILE)


def missing_weights(where: str, names: Collection[str]) -> FolderUnusable:
    """Why the files of these names in the place `where` are no adapter, and the way out."""
    for name in PICKLED_FILES:
        if name in names:
            return FolderUnusable(
                "pickle_refused",
                f"{where}/{name} is a pickle, which could execute code. Save it again with "
                "model.save_pretrained(path, safe_serialization=True).",
            )
    if MODEL_CONFIG_FILE in names and CONFIG_FILE not in names:
        return _unusable(
            f"{where} holds a whole model and no adapter. Save the PEFT model itself, before "
            "merge_and_unload(): peft_model.save_pretrained(path)."
        )
    return _unusable(
        f"{where} has no {WEIGHTS_FILE}: give the folder that PEFT's save_pretrained wrote."
    )


def _unusable(message: str) -> FolderUnusable:
    return FolderUnusable("invalid_parameter", message)
