"""The folder of a trainer on a Ray node. It does not outlive its owner, however that ends.

A process of its own, the keeper, removes it: `python -m loraplex.api.ray.trainer_folder DIR`. What
the loss of a node leaves is removed when the next folder is made there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...engine.tuning.environment import trainer_environment
from ..tuning.work_folders import WorkFolder

RETRY_SECONDS = 0.2
"""A trainer that has not noticed yet that its owner is gone may still write."""


class TrainerFolder:
    """A new folder for one trainer, of this process's user alone."""

    def __init__(self, root: Path) -> None:
        """`root`: of all trainers of this node. Raises OSError."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(root):
            _remove_abandoned(root)
            path = Path(tempfile.mkdtemp(dir=root))
            held = _lock(path)
        self.work = WorkFolder(path)
        self.work.make()
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(path)],
            stdin=subprocess.PIPE,
            env=trainer_environment(os.environ),
            pass_fds=[held],  # the lock is the keeper's from now on
            start_new_session=True,
        )
        os.close(held)
        self._keeper.wait()

    def close(self) -> None:
        """Let the keeper remove it; does not wait."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _lock(folder: Path) -> int:
    """A descriptor that holds the lock until its last copy is closed. Raises BlockingIOError if the
    folder has a keeper."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise
    return held


def _remove_abandoned(root: Path) -> None:
    """Remove the folders that have no keeper."""
    for path in root.iterdir():
        try:
            held = _lock(path)
        except BlockingIOError:
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def main() -> None:
    """The keeper. Its standard input ends with the owner."""
    if os.fork():  # Ray kills the children of an actor that ends, and not their children
        os._exit(0)
    sys.stdin.buffer.read()
    path = Path(sys.argv[1])
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    main()
