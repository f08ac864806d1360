"""What the intake child gives up before it reads a tenant's first byte.

Guaranteed on every Unix: the limits on address space, processor time, file size, open files and
core dumps. Best effort, where the kernel lets an unprivileged process do it: an own network
namespace, in which there is no way out, not even to this host (Linux with user namespaces); no
file changed outside the output's folder, and no TCP (Linux with Landlock). Where neither can be
had, the process runs with the server's own rights to the network and to files.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from .landlock import allow_new_files_only_in

MAX_OPEN_FILES = 32
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Hard limits of one process."""

    memory_bytes: int
    """Address space."""
    cpu_seconds: int
    file_bytes: int
    """The longest file it may write."""


def confine(limits: ProcessLimits, *, output_directory: Path) -> None:
    """Give up resources and, where possible, the network and other files; cannot be undone.

    `output_directory` is the only place where files may still be made.
    """
    _leave_network()
    allow_new_files_only_in(output_directory)
    _lower(resource.RLIMIT_AS, limits.memory_bytes)
    _lower(resource.RLIMIT_CPU, limits.cpu_seconds, grace=1)  # SIGXCPU first, SIGKILL at the grace
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, limit: int, grace: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    bound = limit + grace if hard == resource.RLIM_INFINITY else min(limit + grace, hard)
    resource.setrlimit(kind, (min(limit, bound), bound))


def _leave_network() -> None:
    """Move into an empty network namespace; a user namespace grants the right to where it may."""
    if sys.platform != "linux":
        return
    unshare = ctypes.CDLL(None).unshare  # os.unshare came with Python 3.12
    if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        unshare(_CLONE_NEWNET)
