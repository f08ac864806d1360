"""Memory of this machine that could still be allocated. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path


def available_host_bytes() -> int:
    """What the machine and the control group of this process have left."""
    return min(_meminfo_available(), _cgroup_available())


def status_bytes(status: Path, field: str) -> int:
    """A field of a file such as `/proc/self/status`, which has it in KiB."""
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def _meminfo_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return status_bytes(meminfo, "MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_available() -> int:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or (value := limit.read_text().strip()) == "max":
        return 1 << 62
    return int(value) - int(used.read_text())
