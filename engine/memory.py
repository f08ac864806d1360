"""How much of the device goes to activations, adapters and KV blocks.

Decided once at start from a profile run, printed with the arithmetic, refused when it does not fit.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .config import EngineConfig
from .errors import InsufficientMemory
from .kv_layout import KvGroup

RESERVE_FRACTION = 0.1
"""Of the memory that is free after the weights are loaded: for what the profile run cannot see."""
ARENA_FRACTION = 0.25
"""Of what the weights and activations leave, if the operator gives no size."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the engine's pools."""

    arena_bytes: int
    kv_groups: tuple[KvGroup, ...]
    num_swap_slots: tuple[int, ...]
    """Blocks of host memory per group; empty: preempted sequences are computed again."""
    max_model_len: int
    """The longest sequence that fits; shorter than the model's own only if nobody asked."""
    lines: list[str]
    """The arithmetic, for the operator."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks that sequences can hold, over all groups."""
        return sum(group.num_usable for group in self.kv_groups)


def plan_memory(
    config: EngineConfig,
    *,
    available_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    groups: Sequence[KvGroup],
    bytes_per_block: Sequence[int],
    max_model_len: int,
    is_host: bool,
) -> MemoryPlan:
    """Divide `available_bytes` (free now, with the weights loaded) among the pools.

    `groups`: which layers share blocks; their number of blocks is decided here, `bytes_per_block`
    is what a block of each takes. `is_host`: the device is the host itself, so its memory also
    holds the host cache, the swap space, and the decode windows: copies of the adapters that decode
    together, given as much as the arena.

    Raises InsufficientMemory when less than one longest sequence of KV would remain.
    """
    if config.memory_bytes is not None:
        available_bytes = min(available_bytes, config.memory_bytes - weight_bytes)
    reserve = int(available_bytes * RESERVE_FRACTION)
    host_bytes = config.host_cache_bytes + config.swap_bytes if is_host else 0
    usable = available_bytes - reserve - activation_bytes - host_bytes
    copies = 2 if is_host else 1
    arena = config.arena_bytes
    if arena is None:
        arena = max(0, int(usable * ARENA_FRACTION / copies))
    demands = [
        _Demand(config, group, size, max_model_len)
        for group, size in zip(groups, bytes_per_block, strict=True)
    ]
    kv = config.kv_cache_bytes
    if kv is None:
        kv = max(0, min(usable - copies * arena, _wanted_bytes(demands, max_model_len)))
    num_blocks = _divide(kv, demands)
    num_swap_slots = _swap_slots(config.swap_bytes, demands, num_blocks)
    lines = [
        f"available beside the weights {_mib(available_bytes)}, weights {_mib(weight_bytes)}",
        f"reserve {_mib(reserve)}, activations of a full step {_mib(activation_bytes)}",
        f"adapter arena {_mib(arena)}"
        + (
            f", its decode windows as much, host cache {_mib(config.host_cache_bytes)}"
            if is_host
            else ""
        ),
        *(demand.line(count) for demand, count in zip(demands, num_blocks, strict=True)),
    ]
    if num_swap_slots:
        slots = " + ".join(map(str, num_swap_slots))
        lines.append(f"swap space for {slots} blocks on the host, {_mib(config.swap_bytes)}")
    if copies * arena + kv > usable:
        raise InsufficientMemory("the given sizes do not fit: " + "; ".join(lines))
    for demand, count in zip(demands, num_blocks, strict=True):
        if count < demand.least or _bytes(demands, num_blocks) > kv:
            raise InsufficientMemory(
                f"one sequence of {max_model_len} tokens needs {demand.least} KV blocks: "
                + "; ".join(lines)
            )
    whole = [
        count * config.kv_block_size
        for group, count in zip(groups, num_blocks, strict=True)
        if group.window is None
    ]
    return MemoryPlan(
        arena_bytes=arena,
        kv_groups=tuple(
            replace(group, num_blocks=count + 1)
            for group, count in zip(groups, num_blocks, strict=True)
        ),
        num_swap_slots=num_swap_slots,
        max_model_len=min([max_model_len, *whole]),
        lines=lines,
    )


@dataclass(frozen=True, slots=True)
class _Demand:
    """What one group of layers can make use of."""

    config: EngineConfig
    group: KvGroup
    bytes_per_block: int
    max_model_len: int

    def wanted(self, num_tokens: int) -> int:
        """Blocks of a full batch of sequences of `num_tokens` tokens, amid a step of prefill."""
        config = self.config
        blocks = config.max_num_seqs * -(-num_tokens // config.kv_block_size)
        if self.group.window is None:
            return blocks
        held = config.max_num_seqs * self._peak(num_tokens)
        return min(blocks, held + -(-config.max_num_batched_tokens // config.kv_block_size))

    @property
    def least(self) -> int:
        """Blocks without which a longest sequence could not even run alone, a block a step."""
        is_negotiable = self.group.window is None and self.config.max_model_len is None
        return 1 if is_negotiable else self._peak(self.max_model_len)

    def line(self, num_blocks: int) -> str:
        group, size = self.group, self.config.kv_block_size
        line = (
            f"KV cache {num_blocks} blocks of {size} tokens, {self.bytes_per_block} bytes each: "
            f"{_mib(num_blocks * self.bytes_per_block)} for "
        )
        if group.window is None:
            return line + f"{num_blocks * size} tokens"
        per_sequence = self._peak(self.max_model_len)
        sinks = f" and {group.sinks} first ones" if group.sinks else ""
        return line + (
            f"{len(group.layers)} layers that see {group.window} tokens{sinks}: "
            f"{num_blocks // per_sequence} sequences of any length"
        )

    def _peak(self, num_tokens: int) -> int:
        size = self.config.kv_block_size
        return self.group.peak_blocks(num_tokens, size, size)


def _divide(kv_bytes: int, demands: Sequence[_Demand]) -> list[int]:
    """Blocks per group, so that no group runs out long before the others.

    Every group gets what a full batch of equally long sequences takes, as long as they can be;
    layers that see everything take the rest.
    """
    longest = demands[0].max_model_len
    num_tokens = bisect_right(
        range(1, longest + 1), kv_bytes, key=lambda length: _wanted_bytes(demands, length)
    )
    num_tokens = max(1, num_tokens)
    scale = kv_bytes / _wanted_bytes(demands, num_tokens)
    if any(demand.group.window is None for demand in demands):
        scale = min(1.0, scale)
    windowed = {
        index: max(demand.least, int(demand.wanted(num_tokens) * scale))
        for index, demand in enumerate(demands)
        if demand.group.window is not None
    }
    taken = sum(demands[index].bytes_per_block * count for index, count in windowed.items())
    return [
        windowed.get(index, max(0, kv_bytes - taken) // demand.bytes_per_block)
        for index, demand in enumerate(demands)
    ]


def _swap_slots(
    swap_bytes: int, demands: Sequence[_Demand], num_blocks: Sequence[int]
) -> tuple[int, ...]:
    """Host slots per group, in the proportion in which the device holds blocks."""
    total = _bytes(demands, num_blocks)
    if not swap_bytes or not total:
        return ()
    return tuple(count * swap_bytes // total for count in num_blocks)


def _wanted_bytes(demands: Sequence[_Demand], num_tokens: int) -> int:
    return _bytes(demands, [demand.wanted(num_tokens) for demand in demands])


def _bytes(demands: Sequence[_Demand], num_blocks: Sequence[int]) -> int:
    return sum(
        demand.bytes_per_block * count for demand, count in zip(demands, num_blocks, strict=True)
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
