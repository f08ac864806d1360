"""Adapters that can be found in memory, and a check that none remains after its deletion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from support.http_uploads import WEIGHTS, commit, open_upload, put
from support.memory_search import search_memory
from support.models import make_adapter
from support.server import Caller, ServerUnderTest

MARK_EVERY = 64
"""Elements: half of an adapter's pages of memory hold 16 marks or more."""
RANK = 256

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="memory is searched through Linux's /proc"
)


def mark(folder: Path, values: npt.NDArray[Any]) -> None:
    """Let every A hold the four values again and again, in their own element type."""
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        tensors[name] = tensor = tensor.astype(values.dtype)
        if "lora_A" in name:
            for start in range(0, tensor.size - values.size, MARK_EVERY):
                tensor.reshape(-1)[start : start + values.size] = values
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def make_marked(base: Path, folder: Path) -> tuple[Path, Path]:
    """Two adapters, float32 and float16, of more than a mebibyte; `draw_marks` marks them."""
    lora: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK, "scale": 0.02}
    wide, narrow = (make_adapter(base, folder / str(seed), seed=seed, **lora) for seed in (1, 2))
    return wide, narrow


def draw_marks(folders: tuple[Path, Path]) -> list[bytes]:
    """Mark both adapters as none ever was; what to look for, as stored and as served."""
    values = np.random.default_rng().standard_normal((2, 4)).astype(np.float32)
    narrow = values[1].astype(np.float16)
    mark(folders[0], values[0])
    mark(folders[1], narrow)
    return [values[0].tobytes(), narrow.tobytes(), narrow.astype(np.float32).tobytes()]


def in_small_pieces(content: bytes) -> Iterator[bytes]:
    """Of all the sizes that allocators treat differently."""
    sizes = [100, 500, 700, 1000, 1500, 5000, 70_000]
    start = 0
    while start < len(content):
        size = sizes[start % len(sizes)]
        yield content[start : start + size]
        start += size


def use(caller: Caller, name: str) -> None:
    caller.openai.completions.create(model=name, prompt="hello", max_tokens=2)
    for file in (WEIGHTS, "adapter_config.json"):
        answer = caller.http.get(f"/v1/adapters/{name}/versions/1/files/{file}")
        assert answer.status_code == 200, answer.text


def send_what_is_refused(caller: Caller, folder: Path) -> None:
    """Bytes that never become a version: of another hash, too many, and broken off."""
    content = (folder / WEIGHTS).read_bytes()
    upload = open_upload(caller, folder, "other", sha256="ab" * 32)
    assert put(caller, upload, in_small_pieces(content), 0).is_success
    assert commit(caller, upload).json()["error"]["code"] == "digest_mismatch"
    upload = open_upload(caller, folder, "more", size_bytes=len(content) // 2)
    assert put(caller, upload, content, 0).json()["error"]["code"] == "body_too_large"
    upload = open_upload(caller, folder, "less")
    with pytest.raises((httpx.TransportError, ZeroDivisionError)):
        put(caller, upload, (content[:100_000] if i == 0 else content[: 1 // 0] for i in (0, 1)), 0)


def check_erasure(server: ServerUnderTest, caller: Caller, folder: Path, base: Path) -> None:
    """Push, use, download and delete adapters of `base`, and search every process for them."""
    folders = make_marked(base, folder)
    marks = draw_marks(folders)
    for name, folder in zip(("wide", "narrow"), folders, strict=True):
        caller.push(folder, name)
        use(caller, name)
    send_what_is_refused(caller, folders[0])
    held = search_memory(server.process.pid, marks)
    assert any(found.counts[0] for found in held), "the search sees what is served"
    assert any(found.counts[2] for found in held)
    for name in ("wide", "narrow"):
        answer = caller.http.delete(f"/v1/adapters/{name}", params={"drain_seconds": 0})
        assert answer.status_code == 200, answer.text
    left = search_memory(server.process.pid, marks)
    assert not left, left
