"""Confines the intake child before it reads a tenant's first byte.

There are three mechanisms. Each reports its own reason if it is unavailable:

- namespaces: a new user, network and IPC namespace without a route to any host, including this one
  (Linux with user namespaces);
- Landlock: no file is readable except the input, Python and its libraries, none is writable except
  the output, no program can be started, no TCP (Linux with Landlock);
- limits on address space, processor time, file size, open files, processes and core dumps (every
  Unix).

A fourth mechanism, a seccomp filter, is left to the container, because no maintained Python package
provides one (decision 39). `confinement_probe` measures which mechanisms are active.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .landlock import allow_only, forbid_new_privileges, why_no_landlock

MAX_OPEN_FILES = 32
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CLONE_NEWIPC = 0x08000000
_SET_PARENT_DEATH_SIGNAL = 1
_FIRST_TO_BE_KILLED = "1000"
_WHY_NO_NAMESPACE = {
    errno.EPERM: "user namespaces are forbidden: allow `unshare` for this process in the seccomp "
    "or AppArmor profile and the kernel's settings",
    errno.ENOSPC: "no namespace can be created: raise `user.max_user_namespaces` and "
    "`user.max_net_namespaces`",
    errno.EINVAL: "the kernel has no user namespaces",
}


class Mechanism(StrEnum):
    """The mechanisms that confine the child."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    LIMITS = "limits"
    SECCOMP = "seccomp"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Hard limits of one process."""

    memory_bytes: int
    """Address space."""
    cpu_seconds: int
    file_bytes: int
    """The longest file it may write."""


def confine(
    limits: ProcessLimits, *, read: Sequence[Path], write: Sequence[Path]
) -> Mapping[Mechanism, str]:
    """Give up resources and, where possible, the network and other files; cannot be undone.

    `read` and `write` are the existing files that may still be read and written. Returns the
    unavailable mechanisms, each with the reason.
    """
    die_first()
    refusals = {
        Mechanism.NAMESPACES: leave_network(),
        Mechanism.LANDLOCK: why_no_landlock(),
    }
    allow_only(read=[*read, *_program_folders()], write=write)
    limit_resources(limits)
    lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    lower_limit(resource.RLIMIT_NPROC, 0)  # no fork, no thread; it does not hold for root
    return {mechanism: reason for mechanism, reason in refusals.items() if reason is not None}


def die_first() -> None:
    """End with the thread that started this process, and before the server when memory runs out.

    Also forbid further privileges from programs (set-user-ID).
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    with suppress(OSError):  # `/proc` may be missing or read-only
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_BE_KILLED)
    forbid_new_privileges()


def limit_resources(limits: ProcessLimits) -> None:
    """Lower the limits on memory, processor time and file size; leave no core dump."""
    lower_limit(resource.RLIMIT_AS, limits.memory_bytes)
    # SIGXCPU first, SIGKILL at the grace.
    lower_limit(resource.RLIMIT_CPU, limits.cpu_seconds, grace=1)
    lower_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    lower_limit(resource.RLIMIT_CORE, 0)


def _program_folders() -> list[Path]:
    """The folders of Python, imported packages and shared libraries; some files are read at first
    use."""
    modules = (sys.modules.get(name) for name in ("os", "numpy", "loraplex.adapters.errors"))
    files = [Path(module.__file__) for module in modules if module and module.__file__]
    packages = [file.resolve().parent for file in files]
    numpy_libraries = [folder.with_name("numpy.libs") for folder in packages]
    return [*packages, *numpy_libraries, *map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64"))]


def lower_limit(kind: int, limit: int, grace: int = 0) -> None:
    """Set the soft limit, and the hard limit to as much more as `grace`, if they are higher."""
    _, hard = resource.getrlimit(kind)
    bound = limit + grace if hard == resource.RLIM_INFINITY else min(limit + grace, hard)
    resource.setrlimit(kind, (min(limit, bound - grace), bound))


def leave_network() -> str | None:
    """Move into empty namespaces; a user namespace grants the right to. Returns why it cannot."""
    if sys.platform != "linux":
        return "only Linux has them"
    unshare = ctypes.CDLL(None, use_errno=True).unshare  # os.unshare came with Python 3.12
    if unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0:
        return None
    reason = ctypes.get_errno()
    if unshare(_CLONE_NEWNET | _CLONE_NEWIPC) == 0:  # root may without a user namespace
        return None
    return _WHY_NO_NAMESPACE.get(reason, os.strerror(reason))
