"""Starts short-lived child processes without the server's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

from .niceness import yield_processor

# -P: do not import from the working directory; -S: skip site initialization, which the environment
# could influence.
PYTHON = (sys.executable, "-P", "-S")


def child_environment() -> dict[str, str]:
    """The import path, and one thread for numpy."""
    return {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def start_child(
    module: str, *, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """`python -m module` with these three files and nothing else of the server's, at a lower
    priority than the engine. Raises OSError."""
    child = subprocess.Popen(
        [*PYTHON, "-m", module],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd="/",  # not the server's working directory
        env=child_environment(),
        start_new_session=True,
    )
    yield_processor(child.pid)
    return child
