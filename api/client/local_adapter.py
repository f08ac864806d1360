"""An adapter's files in a folder: checked and hashed before anything is sent."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...adapters.added_tokens import FIELD as ADDED_TOKENS
from .errors import InvalidAdapter
from .trained_tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TokenFields, read_added_tokens

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_CONFIG_FILE = "config.json"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
"""All that a push reads."""
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


@dataclass(frozen=True, slots=True)
class LocalAdapter:
    """A folder that PEFT's save_pretrained wrote."""

    config: dict[str, Any]
    weights: Path
    size_bytes: int
    sha256: str
    tokens: list[TokenFields]
    """Those that the tokenizer beside it lists as added, the base's too."""

    def config_for(self, num_base_tokens: int) -> dict[str, Any]:
        """The configuration with the tokens that a base does not have."""
        own = [token for token in self.tokens if _is_beyond(token["id"], num_base_tokens)]
        return {ADDED_TOKENS: own, **self.config} if own else self.config


def _is_beyond(token_id: object, num_tokens: int) -> bool:
    return isinstance(token_id, int) and token_id >= num_tokens


def read_adapter(folder: Path) -> LocalAdapter:
    """Check the folder and hash its weights. Raises InvalidAdapter, saying the way out."""
    weights = folder / WEIGHTS_FILE
    if not folder.is_dir():
        raise InvalidAdapter(f"{folder} is not a folder. Give the one that save_pretrained wrote.")
    if not weights.is_file():
        raise InvalidAdapter(explain_missing_weights(str(folder), os.listdir(folder)))
    with weights.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return LocalAdapter(
        _read_config(folder), weights, weights.stat().st_size, sha256, read_added_tokens(folder)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(config, ensure_ascii=False, allow_nan=False).encode()  # as it will be sent
    except FileNotFoundError:
        raise InvalidAdapter(
            f"{folder} has no {CONFIG_FILE}: push what save_pretrained wrote."
        ) from None
    except (ValueError, RecursionError) as exc:
        raise InvalidAdapter(f"{path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise InvalidAdapter(f"{path} is not a JSON object.")
    return config


def explain_missing_weights(where: str, names: Collection[str]) -> str:
    """Why the files of these names in the place `where` are no adapter, and the way out."""
    for name in PICKLED_FILES:
        if name in names:
            return (
                f"{where}/{name} is a pickle, which could execute code. Save it again with "
                "model.save_pretrained(path, safe_serialization=True)."
            )
    if MODEL_CONFIG_FILE in names and CONFIG_FILE not in names:
        return (
            f"{where} holds a whole model and no adapter. Save the PEFT model itself, before "
            "merge_and_unload(): peft_model.save_pretrained(path)."
        )
    return f"{where} has no {WEIGHTS_FILE}: push what PEFT's save_pretrained wrote."
