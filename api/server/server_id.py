"""This server's id among those that share a database, stored in its data folder."""

from __future__ import annotations

import uuid
from pathlib import Path

from ...adapters.durable import write_whole
from ...platform.base import new_id

FILE = "server_id"


def load_or_create_server_id(data_dir: Path) -> str:
    """The id, the same after every start. Call it with the data folder locked, or two servers may
    differ.

    A file without a valid id, such as one truncated by a crash, is rewritten.
    """
    path = data_dir / FILE
    try:
        return str(uuid.UUID(path.read_text().strip()))
    except (FileNotFoundError, ValueError):
        server_id = new_id()
        write_whole(path, f"{server_id}\n".encode())
        return server_id
