"""The memory plan: how much of the device activations, adapters and KV blocks get.

It is computed once at start from a profile run, printed with the computation, and refused if it
does not fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ...adapters.block import ALIGNMENT_ELEMENTS
from ..config import EngineConfig
from ..errors import InsufficientMemory
from ..kv.layout import KvGroup
from .kv_budget import MIB, KvDemand, divide_kv, divide_swap, wanted_bytes

_ADVICE = (
    "Raise --memory-gib, or lower --max-model-len, --max-num-batched-tokens, --host-cache-gib, "
    "--arena-gib or --kv-cache-gib."
)
RESERVE_FRACTION = 0.1
"""The part of the free memory after loading the weights that is reserved for what the profile run
cannot see."""
ARENA_FRACTION = 0.25
"""The part of the memory after weights and activations, if the operator sets no size."""
ARENA_UNIT_BYTES = 4 * ALIGNMENT_ELEMENTS
"""The remainder of such a unit could hold no adapter of any dtype, and would count as used."""
WINDOW_FRACTION = 1 / 16
"""The part of the arena for the CPU's decode windows: copies of the adapters that decode
together."""


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
    """The longest sequence that fits; shorter than the model's only if the operator set no
    length."""
    lines: list[str]
    """The arithmetic, for the operator."""
    num_draft_blocks: int = 0
    """Blocks of the draft model's KV cache."""

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

    Raises InsufficientMemory when less than the KV of one longest sequence would remain.
    """
    draft = draft or DraftDemand()
    if config.memory_bytes is not None:
        loaded_bytes = weight_bytes + draft.weight_bytes + head_bytes
        available_bytes = min(available_bytes, config.memory_bytes - loaded_bytes)
    demands = [
        KvDemand(config, group, size, max_model_len)
        for group, size in zip(groups, bytes_per_block, strict=True)
    ]
    pools = _divide(
        config,
        demands,
        draft,
        available_bytes=available_bytes,
        taken_bytes=activation_bytes + graph_bytes,
        is_host=is_host,
        has_windows=has_windows,
    )
    lines = [
        f"available besides the weights {_mib(available_bytes)}, weights {_mib(weight_bytes)}",
        f"reserve {_mib(pools.reserve)}, activations of a full step {_mib(activation_bytes)}",
        *pools.lines(config, draft, is_host=is_host),
    ]
    if graph_bytes:
        lines.append(f"decode graphs {_mib(graph_bytes)}")
    if head_bytes:
        lines.append(f"Medusa heads {_mib(head_bytes)}")
    num_blocks = _divide_kv(pools, demands, lines)
    lines += [demand.line(count) for demand, count in zip(demands, num_blocks, strict=True)]
    if config.swap_bytes:
        lines.append(f"swap space on the host {_mib(config.swap_bytes)}")
    return MemoryPlan(
        arena_bytes=pools.arena,
        window_bytes=pools.windows,
        kv_groups=tuple(
            replace(group, num_blocks=count + 1)
            for group, count in zip(groups, num_blocks, strict=True)
        ),
        num_swap_slots=divide_swap(config.swap_bytes, demands, num_blocks),
        max_model_len=_longest(demands, num_blocks, config.kv_block_size),
        lines=lines,
        num_draft_blocks=pools.num_draft_blocks,
    )


@dataclass(frozen=True, slots=True)
class _Pools:
    """Bytes by purpose."""

    reserve: int
    usable: int
    """Bytes of all the following."""
    arena: int
    windows: int
    kv: int
    num_draft_blocks: int
    draft_kv: int

    @property
    def all_kv(self) -> int:
        return self.kv + self.draft_kv

    @property
    def do_fit(self) -> bool:
        return self.arena + self.windows + self.all_kv <= self.usable

    def lines(self, config: EngineConfig, draft: DraftDemand, *, is_host: bool) -> Iterator[str]:
        windows = f", decode windows {_mib(self.windows)}" if self.windows else ""
        yield f"adapter arena {_mib(self.arena)}{windows}"
        if is_host:
            yield f"host cache {_mib(config.host_cache_bytes)}"
        if draft.weight_bytes:
            yield (
                f"draft model {_mib(draft.weight_bytes)}, its KV cache {self.num_draft_blocks} "
                f"blocks of {config.kv_block_size} tokens, {draft.bytes_per_block} bytes each: "
                f"{_mib(self.draft_kv)}"
            )


def _divide(
    config: EngineConfig,
    demands: Sequence[KvDemand],
    draft: DraftDemand,
    *,
    available_bytes: int,
    taken_bytes: int,
    is_host: bool,
    has_windows: bool,
) -> _Pools:
    reserve = int(available_bytes * RESERVE_FRACTION)
    host_bytes = config.host_cache_bytes + config.swap_bytes if is_host else 0
    usable = available_bytes - reserve - taken_bytes - host_bytes
    arena = config.arena_bytes
    if arena is None:
        arena = max(0, int(usable * ARENA_FRACTION)) // ARENA_UNIT_BYTES * ARENA_UNIT_BYTES
    windows = _window_bytes(config, arena) if has_windows else 0
    block_bytes = sum(demand.bytes_per_block for demand in demands)
    kv = config.kv_cache_bytes
    if kv is None:
        left = (usable - arena - windows) * block_bytes // (block_bytes + draft.bytes_per_block)
        kv = max(0, min(left, wanted_bytes(demands, demands[0].max_model_len)))
    num_draft_blocks = kv // block_bytes if draft.bytes_per_block else 0
    return _Pools(
        reserve=reserve,
        usable=usable,
        arena=arena,
        windows=windows,
        kv=kv,
        num_draft_blocks=num_draft_blocks,
        draft_kv=num_draft_blocks * draft.bytes_per_block,
    )


def _divide_kv(pools: _Pools, demands: Sequence[KvDemand], lines: Sequence[str]) -> list[int]:
    """Each group's blocks. Raises InsufficientMemory; `lines` say where the rest went."""
    if not pools.do_fit:
        raise InsufficientMemory(
            f"Not enough memory for a KV cache of {_mib(pools.all_kv)}: {'; '.join(lines)}. "
            f"{_ADVICE}"
        )
    num_blocks = divide_kv(pools.kv, demands)
    if num_blocks is None:
        least = " + ".join(str(demand.least) for demand in demands)
        raise InsufficientMemory(
            f"Not enough memory: one sequence of {demands[0].max_model_len} tokens needs {least} "
            f"KV blocks, more than {_mib(pools.kv)} hold: {'; '.join(lines)}. {_ADVICE}"
        )
    return num_blocks


def _longest(demands: Sequence[KvDemand], num_blocks: Sequence[int], block_size: int) -> int:
    """The longest sequence whose layers that see all of it have room for it."""
    held = [
        count * block_size
        for demand, count in zip(demands, num_blocks, strict=True)
        if demand.sees_all
    ]
    return min([demands[0].max_model_len, *held])


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
