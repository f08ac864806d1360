"""The base's layout as a file in the data folder, for the intake processes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...adapters.layout import BaseLayout, layout_to_json


def write_layout(data_dir: Path, layout: BaseLayout) -> Path:
    """The file, written if it is missing. Each base has its own file."""
    content = layout_to_json(layout).encode()
    path = data_dir / f"layout-{hashlib.sha256(content).hexdigest()}.json"
    if path.exists() and path.read_bytes() == content:
        return path  # also on a full disk
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(content)
    return unfinished.replace(path)
