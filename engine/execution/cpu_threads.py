"""The number of CPU threads for tensor work: the cores that other processes leave.

OpenMP's threads spin while they wait for each other. On cores of their own that is the fastest way
to wait. If another process wants one of the cores, each parallel region waits for the thread whose
core is taken, and the spinning threads take the cores of others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

INTERVAL_SECONDS = 1.0
"""How often the number is adjusted."""
_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4)
"""Positions of idle and iowait in a core's line of `/proc/stat`."""


class CpuThreads:
    """Adjusts PyTorch's number of threads to the load of other processes."""

    due_at: float
    """When the number is adjusted next, by the caller's clock; infinite if it is fixed."""

    def __init__(
        self, maximum: int, num_cores: int, others_seconds: Callable[[], float], *, now: float
    ) -> None:
        """`others_seconds` reads the CPU time that other processes have used on these cores."""
        self._maximum = maximum
        self._num_cores = num_cores
        self._others_seconds = others_seconds
        self._others = others_seconds()
        self._read_at = now
        self.due_at = now + INTERVAL_SECONDS if maximum > 1 else math.inf

    def adjust(self, now: float) -> None:
        """Call between steps, when it is due."""
        others = self._others_seconds()
        taken = (others - self._others) / (now - self._read_at)
        self._others, self._read_at, self.due_at = others, now, now + INTERVAL_SECONDS
        num_threads = min(self._maximum, max(1, round(self._num_cores - taken)))
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)


def open_cpu_threads(device: torch.device, now: float) -> CpuThreads:
    """The number is fixed on a GPU, with one thread, and where the system does not report the load
    of its cores."""
    if device.type != "cpu" or not _STAT.exists():
        return CpuThreads(1, 1, float, now=now)
    cores = os.sched_getaffinity(0)
    return CpuThreads(torch.get_num_threads(), len(cores), lambda: _others(cores), now=now)


def _others(cores: set[int]) -> float:
    """CPU seconds that other processes have used on `cores`; time that a hypervisor has taken is
    among them."""
    busy = sum(_busy_ticks(line) for line in _STAT.read_text().splitlines() if _core(line) in cores)
    own = os.times()
    return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


def _core(line: str) -> int:
    """The core that a line of `/proc/stat` describes; -1 for the other lines."""
    name = line.partition(" ")[0]
    return int(name[3:]) if name.startswith("cpu") and name != "cpu" else -1


def _busy_ticks(line: str) -> int:
    # Guest time, the last two of ten fields, is counted in user time already.
    ticks = [int(field) for field in line.split()[1:9]]
    return sum(ticks) - sum(ticks[field] for field in _IDLE_FIELDS)
