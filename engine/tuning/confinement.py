"""Confines the trainer before it reads a byte of a tenant's.

The mechanisms are those of the intake child (`adapters/confinement.py`), with the limits that
training needs: it starts threads, and takes as long as it takes. Everything but the limit of memory
happens before torch is imported, because Landlock and namespaces do not reach threads that run
already.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ...adapters.confinement import Mechanism, die_first, leave_network, lower_limit
from ...adapters.landlock import allow_only, why_no_landlock
from ..checkpoint.files import locate_base
from .messages import Open

NICENESS = 19
MAX_OPEN_FILES = 256
_SYSTEM_FILES = (
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/self/status"),
    *("/sys/devices/system", "/dev/urandom"),
)
_DEVICE_FOLDERS = ("/proc/driver/nvidia", "/sys/bus/pci", "/sys/devices", "/proc/self", "/dev/shm")


def confine_trainer(order: Open) -> Mapping[Mechanism, str]:
    """Give up the network, priority and all files but the order's; cannot be undone.

    Returns the unavailable mechanisms, each with the reason.
    """
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)  # torch then starts as many threads
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    return confine_to(
        read=_inputs(order),
        write=(Path(order.checkpoint_folder), Path(order.result_folder)),
        device=order.device,
    )


def limit_memory(order: Open) -> None:
    """Let allocations above the order's limit fail.

    Called once torch is imported: a library that finds no memory while it is loaded fails in ways
    that do not tell so (`ImportError`, `SystemError`, an abort).
    """
    if order.max_memory_bytes is not None:
        lower_limit(resource.RLIMIT_AS, order.max_memory_bytes)


def confine_to(
    *, read: Iterable[Path], write: Iterable[Path], device: str
) -> Mapping[Mechanism, str]:
    """Give up all but these files, and what Python, torch and the device need."""
    die_first()
    refusals = {
        Mechanism.NAMESPACES: leave_network(),
        Mechanism.LANDLOCK: why_no_landlock(),
    }
    is_host = device == "cpu"
    allow_only(
        read=[*read, *_program_folders(), *map(Path, () if is_host else _DEVICE_FOLDERS)],
        write=[*write, Path("/dev/null"), *(() if is_host else Path("/dev").glob("nvidia*"))],
    )
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    return {mechanism: reason for mechanism, reason in refusals.items() if reason is not None}


def _inputs(order: Open) -> Iterator[Path]:
    model = locate_base(order.model)
    yield model
    yield from {path.resolve().parent for path in model.iterdir()}  # a hub's files are links
    yield Path(order.training_file)
    if order.validation_file is not None:
        yield Path(order.validation_file)


def _program_folders() -> Iterator[Path]:
    yield from (Path(entry) for entry in sys.path if entry)
    package = Path(__file__).resolve().parents[2]
    yield from (package / layer for layer in ("adapters", "engine", "kernels"))
    yield from map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64", *_SYSTEM_FILES))
