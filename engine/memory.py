"""How much of the device goes to activations, adapters and KV blocks.

Decided once at start from a profile run, printed with the arithmetic, refused when it does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .config import EngineConfig
from .errors import InsufficientMemory

RESERVE_FRACTION = 0.1
"""Of the memory that is free after the weights are loaded: for what the profile run cannot see."""
ARENA_FRACTION = 0.25
"""Of what the weights and activations leave, if the operator gives no size."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the engine's two pools."""

    arena_bytes: int
    num_kv_blocks: int
    """The null block included."""
    max_model_len: int
    """The longest sequence that fits; shorter than the model's own only if nobody asked."""
    lines: list[str]
    """The arithmetic, for the operator."""


def plan_memory(
    config: EngineConfig,
    *,
    available_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    bytes_per_block: int,
    max_model_len: int,
    is_host: bool,
) -> MemoryPlan:
    """Divide `available_bytes` (free now, with the weights loaded) among the pools.

    `is_host`: the device is the host itself, so its memory also holds the host cache, and the
    decode windows: copies of the adapters that decode together, given as much as the arena.

    Raises InsufficientMemory when less than one longest sequence of KV would remain.
    """
    if config.memory_bytes is not None:
        available_bytes = min(available_bytes, config.memory_bytes - weight_bytes)
    reserve = int(available_bytes * RESERVE_FRACTION)
    host_cache = config.host_cache_bytes if is_host else 0
    usable = available_bytes - reserve - activation_bytes - host_cache
    copies = 2 if is_host else 1
    arena = config.arena_bytes
    if arena is None:
        arena = max(0, int(usable * ARENA_FRACTION / copies))
    blocks_per_sequence = -(-max_model_len // config.kv_block_size)
    useful = config.max_num_seqs * blocks_per_sequence * bytes_per_block
    kv = config.kv_cache_bytes
    if kv is None:
        kv = max(0, min(usable - copies * arena, useful))
    num_blocks = kv // bytes_per_block
    lines = [
        f"available beside the weights {_mib(available_bytes)}, weights {_mib(weight_bytes)}",
        f"reserve {_mib(reserve)}, activations of a full step {_mib(activation_bytes)}",
        f"adapter arena {_mib(arena)}"
        + (f", its decode windows as much, host cache {_mib(host_cache)}" if is_host else ""),
        f"KV cache {num_blocks} blocks of {config.kv_block_size} tokens, "
        f"{bytes_per_block} bytes each: {_mib(num_blocks * bytes_per_block)} for "
        f"{num_blocks * config.kv_block_size} tokens",
    ]
    if copies * arena + num_blocks * bytes_per_block > usable:
        raise InsufficientMemory("the given sizes do not fit: " + "; ".join(lines))
    if num_blocks < (1 if config.max_model_len is None else blocks_per_sequence):
        raise InsufficientMemory(
            f"one sequence of {max_model_len} tokens needs {blocks_per_sequence} KV blocks: "
            + "; ".join(lines)
        )
    return MemoryPlan(
        arena_bytes=arena,
        num_kv_blocks=num_blocks + 1,
        max_model_len=min(max_model_len, num_blocks * config.kv_block_size),
        lines=lines,
    )


def available_bytes(device: torch.device) -> int:
    """Memory that could still be allocated on the device."""
    if device.type == "cuda":
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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
