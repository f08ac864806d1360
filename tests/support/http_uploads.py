"""The push protocol, step by step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from support.server import Caller

WEIGHTS = "adapter_model.safetensors"


def declaration(folder: Path, **changes: Any) -> dict[str, Any]:
    """The body that opens an upload of this folder."""
    weights = (folder / WEIGHTS).read_bytes()
    return {
        "config": json.loads((folder / "adapter_config.json").read_text()),
        "size_bytes": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
        **changes,
    }


def put(
    caller: Caller, upload: dict[str, Any], content: bytes | Iterator[bytes], offset: int
) -> httpx.Response:
    return caller.http.put(
        f"/v1/uploads/{upload['id']}/content",
        content=content,
        params={"offset": offset},
        headers={"content-type": "application/octet-stream"},
    )


def open_upload(caller: Caller, folder: Path, name: str = "bot", **changes: Any) -> dict[str, Any]:
    answer = caller.http.post(f"/v1/adapters/{name}/uploads", json=declaration(folder, **changes))
    assert answer.status_code == 201, answer.text
    upload: dict[str, Any] = answer.json()
    return upload


def commit(caller: Caller, upload: dict[str, Any]) -> httpx.Response:
    return caller.http.post(f"/v1/uploads/{upload['id']}/commit")
