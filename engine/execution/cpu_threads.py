"""The number of CPU threads for tensor work: the cores that other processes leave.

OpenMP's threads spin while they wait for each other. On cores of their own that is the fastest way
to wait. If another process wants one of the cores, each parallel region waits for the thread whose
core is taken, and the spinning threads take the cores of others.
"""

from __future__ import annotations

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

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        maximum: int,
        others_seconds: Callable[[], float],
        num_cores: int,
    ) -> None:
        """`others_seconds` reads the CPU time that other processes have used on these cores."""
        self._clock = clock
        self._maximum = maximum
        self._others_seconds = others_seconds
        self._num_cores = num_cores
        self._read_at = clock()
        self._others = others_seconds()

    def adjust_if_due(self) -> None:
        """Call before a step."""
        now = self._clock()
        elapsed = now - self._read_at
        if elapsed < INTERVAL_SECONDS:
            return
        others = self._others_seconds()
        taken = (others - self._others) / elapsed
        self._read_at, self._others = now, others
        num_threads = min(self._maximum, max(1, round(self._num_cores - taken)))
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)


def open_cpu_threads(device: torch.device, clock: Callable[[], float]) -> CpuThreads | None:
    """None if the number is fixed: on a GPU, with one thread, and where the system does not report
    the load of its cores."""
    maximum = torch.get_num_threads()
    if device.type != "cpu" or maximum == 1 or not _STAT.exists():
        return None
    cores = os.sched_getaffinity(0)
    return CpuThreads(
        clock, maximum=maximum, others_seconds=lambda: _others(cores), num_cores=len(cores)
    )


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
