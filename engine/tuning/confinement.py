"""Confines the trainer before it reads a byte of a tenant's.

The mechanisms are those of the intake child (`adapters/confinement.py`), with the limits that
training needs: it starts threads, and takes as long as it takes. Everything happens before torch is
imported, because Landlock and namespaces do not reach threads that run already.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
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
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    die_first()
    refusals = {
        Mechanism.NAMESPACES: leave_network(),
        Mechanism.LANDLOCK: why_no_landlock(),
    }
    allow_only(read=_readable(order), write=_writable(order))
    if order.max_memory_bytes is not None:
        lower_limit(resource.RLIMIT_AS, order.max_memory_bytes)
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    return {mechanism: reason for mechanism, reason in refusals.items() if reason is not None}


def _readable(order: Open) -> Iterator[Path]:
    model = locate_base(order.model)
    yield model
    yield from {path.resolve().parent for path in model.iterdir()}  # a hub's files are links
    yield Path(order.training_file)
    if order.validation_file is not None:
        yield Path(order.validation_file)
    yield from (Path(entry) for entry in sys.path if entry)
    package = Path(__file__).resolve().parents[2]
    yield from (package / layer for layer in ("adapters", "engine", "kernels"))
    yield from map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64", *_SYSTEM_FILES))
    if order.device != "cpu":
        yield from map(Path, _DEVICE_FOLDERS)


def _writable(order: Open) -> Iterator[Path]:
    yield from (Path(order.checkpoint_folder), Path(order.result_folder), Path("/dev/null"))
    if order.device != "cpu":
        yield from Path("/dev").glob("nvidia*")
