"""The CPU threads of one rank: those on one host share its cores."""

from __future__ import annotations

import os

from ..config import EngineConfig


def threads_per_rank(config: EngineConfig, num_ranks_here: int) -> int:
    """The operator's number, else an equal share of the host's cores."""
    return config.num_threads or max(1, num_cores() // num_ranks_here)


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
