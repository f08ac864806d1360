"""Finds the running servers of this user on this machine, for commands that run next to them.

While a server runs, it keeps a file with its URL and data folder, and a lock on it. The system
releases the lock however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server."""

    url: str
    data_dir: str
    """Absolute."""
    has_embedded_database: bool
    """False: the database was named by `--database` or `LORAPLEX_DATABASE`."""


@contextmanager
def registered(server: RunningServer) -> Iterator[None]:
    """Make the server known to other commands of this user until the block is left. If no suitable
    folder exists, such as under a read-only root, nothing is registered."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_locked_file(server))
        yield


def list_running_servers() -> list[RunningServer]:
    """The running servers of this user, by URL. Files of killed servers are removed."""
    try:
        paths = sorted(_own_folder().glob(f"*{_SUFFIX}"))
    except OSError:
        return []
    found = (_read_if_running(path) for path in paths)
    return sorted((server for server in found if server), key=lambda server: server.url)


@contextmanager
def _locked_file(server: RunningServer) -> Iterator[None]:
    """Written and locked under another name first: no reader sees it half or unlocked."""
    folder = _own_folder()
    descriptor, unfinished = tempfile.mkstemp(dir=folder)
    path = folder / f"{os.getpid()}{_SUFFIX}"
    with open(descriptor, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(server), file)
        file.flush()
        os.replace(unfinished, path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another server's file exists
                folder.rmdir()


def _read_if_running(path: Path) -> RunningServer | None:
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return RunningServer(**json.load(file))
            path.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError):
        return None
    return None


def _own_folder() -> Path:
    """A folder that no other user can write to. Raises OSError if there is none."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK):
        folder = Path(runtime) / "loraplex"
    else:
        folder = Path(tempfile.gettempdir()) / f"loraplex-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is accessible to other users")
    return folder
