"""How much of the device goes to activations, adapters and KV blocks.

Decided once at start from a profile run, printed with the arithmetic, refused when it does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ..adapters.block import ALIGNMENT_ELEMENTS
from .config import EngineConfig
from .errors import InsufficientMemory
from .kv_budget import MIB, KvDemand, divide_kv, divide_swap, wanted_bytes
from .kv_layout import KvGroup

RESERVE_FRACTION = 0.1
ARENA_UNIT_BYTES = 4 * ALIGNMENT_ELEMENTS
"""Of the memory that is free after the weights are loaded: for what the profile run cannot see."""
ARENA_FRACTION = 0.25
"""Of what the weights and activations leave, if the operator gives no size."""
WINDOW_FRACTION = 1 / 16
"""Of the arena, for the CPU's decode windows: copies of the adapters that decode together."""


class DraftDemand(NamedTuple):
    """What a draft model takes: nothing where there is none."""

    weight_bytes: int = 0
    bytes_per_block: int = 0
    """Of its KV cache."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the engine's pools."""

    arena_bytes: int
    window_bytes: int
    """For copies of the adapters that decode together; 0 where none are made."""
    kv_groups: tuple[KvGroup, ...]
    num_swap_slots: tuple[int, ...]
    """Blocks of host memory per group; empty: preempted sequences are computed again."""
    max_model_len: int
    """The longest sequence that fits; shorter than the model's own only if nobody asked."""
    lines: list[str]
    """The arithmetic, for the operator."""
    num_draft_blocks: int = 0
    """Of the draft model's KV cache."""

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
    has_windows: bool = False,
    draft: DraftDemand | None = None,
    head_bytes: int = 0,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """Divide `available_bytes` (free now, with the weights loaded) among the pools.

    `groups`: which layers share blocks; their number of blocks is decided here, `bytes_per_block`
    is what a block of each takes. `is_host`: the device is the host itself, so its memory also
    holds the host cache and the swap space. `has_windows`: there are decode windows, copies of the
    adapters that decode together. `draft`: a draft model, which gets as many tokens of KV as the
    base would have, did all its layers see everything. `head_bytes`: what Medusa heads take, which
    are loaded too. `graph_bytes`: what captured decode steps will take.

    Raises InsufficientMemory when less than one longest sequence of KV would remain.
    """
    draft = draft or DraftDemand()
    if config.memory_bytes is not None:
        loaded_bytes = weight_bytes + draft.weight_bytes + head_bytes
        available_bytes = min(available_bytes, config.memory_bytes - loaded_bytes)
    reserve = int(available_bytes * RESERVE_FRACTION)
    host_bytes = config.host_cache_bytes + config.swap_bytes if is_host else 0
    usable = available_bytes - reserve - activation_bytes - graph_bytes - host_bytes
    arena = config.arena_bytes
    if arena is None:
        # Whole units of every type: what is over could hold no adapter, and would count as used.
        arena = max(0, int(usable * ARENA_FRACTION)) // ARENA_UNIT_BYTES * ARENA_UNIT_BYTES
    windows = _window_bytes(config, arena) if has_windows else 0
    demands = [
        KvDemand(config, group, size, max_model_len)
        for group, size in zip(groups, bytes_per_block, strict=True)
    ]
    kv = config.kv_cache_bytes
    if kv is None:
        left = (usable - arena - windows) * sum(bytes_per_block)
        left //= sum(bytes_per_block) + draft.bytes_per_block
        kv = max(0, min(left, wanted_bytes(demands, max_model_len)))
    num_draft_blocks = kv // sum(bytes_per_block) if draft.bytes_per_block else 0
    draft_kv = num_draft_blocks * draft.bytes_per_block
    lines = [
        f"available beside the weights {_mib(available_bytes)}, weights {_mib(weight_bytes)}",
        f"reserve {_mib(reserve)}, activations of a full step {_mib(activation_bytes)}",
        f"adapter arena {_mib(arena)}" + (f", decode windows {_mib(windows)}" if windows else ""),
    ]
    if graph_bytes:
        lines.append(f"decode graphs {_mib(graph_bytes)}")
    if is_host:
        lines.append(f"host cache {_mib(config.host_cache_bytes)}")
    if draft.weight_bytes:
        lines.append(
            f"draft model {_mib(draft.weight_bytes)}, its KV cache {num_draft_blocks} blocks of "
            f"{config.kv_block_size} tokens, {draft.bytes_per_block} bytes each: {_mib(draft_kv)}"
        )
    if head_bytes:
        lines.append(f"Medusa heads {_mib(head_bytes)}")
    if arena + windows + kv + draft_kv > usable:
        raise InsufficientMemory(f"{_mib(kv + draft_kv)} for KV do not fit: " + "; ".join(lines))
    num_blocks = divide_kv(kv, demands)
    if num_blocks is None:
        least = " + ".join(str(demand.least) for demand in demands)
        raise InsufficientMemory(
            f"one sequence of {max_model_len} tokens needs {least} KV blocks, there are "
            f"{_mib(kv)} for them: " + "; ".join(lines)
        )
    lines += [demand.line(count) for demand, count in zip(demands, num_blocks, strict=True)]
    if config.swap_bytes:
        lines.append(f"swap space on the host {_mib(config.swap_bytes)}")
    held = [
        count * config.kv_block_size
        for demand, count in zip(demands, num_blocks, strict=True)
        if demand.sees_all
    ]
    return MemoryPlan(
        arena_bytes=arena,
        window_bytes=windows,
        kv_groups=tuple(
            replace(group, num_blocks=count + 1)
            for group, count in zip(groups, num_blocks, strict=True)
        ),
        num_swap_slots=divide_swap(config.swap_bytes, demands, num_blocks),
        max_model_len=min([max_model_len, *held]),
        lines=lines,
        num_draft_blocks=num_draft_blocks,
    )


def _window_bytes(config: EngineConfig, arena_bytes: int) -> int:
    if config.lora_window_bytes is not None:
        return config.lora_window_bytes
    return int(arena_bytes * WINDOW_FRACTION)


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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
