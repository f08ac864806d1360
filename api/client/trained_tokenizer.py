"""The tokens in the tokenizer that a trainer saved beside an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")

TokenFields = dict[str, Any]
"""As `adapters.added_tokens.AddedToken`."""


def read_added_tokens(folder: Path) -> list[TokenFields]:
    """All tokens that `tokenizer.json` lists as added, the base's too; none if there is no such
    file, or it cannot be read as one."""
    added = _read_json(folder / TOKENIZER_FILE).get("added_tokens")
    end = _read_json(folder / TOKENIZER_CONFIG_FILE).get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if not isinstance(added, list):
        return []
    return [_fields(token, end) for token in added if isinstance(token, dict)]


def _fields(token: dict[str, Any], end: object) -> TokenFields:
    content = token.get("content")
    flags = {name: True for name in _FLAGS if token.get(name)}
    if content == end:
        flags["ends_output"] = True
    return {"id": token.get("id"), "content": content, **flags}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
