"""Who this server is to the others: an id that stays with its data folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from uuid import UUID

from ..platform.base import new_id

SERVER_ID_FILE = "server-id"


def load_server_id(data_dir: Path) -> str:
    """The id written in the folder, which must be locked; made on first use, or if it is none."""
    path = data_dir / SERVER_ID_FILE
    with suppress(FileNotFoundError, ValueError):
        return str(UUID(path.read_text().strip()))
    server_id = new_id()
    unfinished = path.with_suffix(".new")
    unfinished.write_text(f"{server_id}\n")
    unfinished.replace(path)
    return server_id
