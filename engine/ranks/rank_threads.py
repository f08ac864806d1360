"""The CPU threads of one rank: the ranks of a group share the machine's cores."""

from __future__ import annotations

import os

from ..config import EngineConfig


def threads_per_rank(config: EngineConfig) -> int:
    """The operator's number, else an equal share of the cores."""
    return config.num_threads or max(1, num_cores() // config.num_ranks)


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
