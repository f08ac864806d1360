"""Memory of the engine's device: what is free, and the peak of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Memory of the device, after the weights are loaded."""

    free_bytes: int
    is_host: bool
    """The device is the host: its memory also holds the host cache and the swap space."""


def measure_memory(device: torch.device) -> DeviceMemory:
    return DeviceMemory(available_bytes(device), is_host=device.type == "cpu")


def available_bytes(device: torch.device) -> int:
    """Memory that could still be allocated on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # PyTorch keeps what was freed, as weights that became codes
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_meminfo_available(), _cgroup_available())


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """By how much `run` raises the device's memory at its highest point."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: the reserve has to do
        run()
        return 0
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status_bytes(status, "VmRSS")
    run()
    return max(0, _status_bytes(status, "VmHWM") - before)


def _status_bytes(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def _meminfo_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return _status_bytes(meminfo, "MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_available() -> int:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or (value := limit.read_text().strip()) == "max":
        return 1 << 62
    return int(value) - int(used.read_text())
