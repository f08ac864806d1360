"""The memory plan: how much of the device activations, adapters and KV blocks get.

It is computed once at start from a profile run, printed with the computation, and refused if it
does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...adapters.untouched import CAN_GIVE_BACK
from ..config import EngineConfig, source_of
from ..errors import InsufficientMemory
from ..kv.block_memory import UNIT_BYTES
from ..kv.layout import KvGroup
from .border_plan import ARENA_UNIT_BYTES, plan_border
from .budget import Bounds
from .demands import BaseDemand, ProposerDemand
from .device_memory import DeviceMemory
from .host_plan import HostPlan, plan_host
from .kv_budget import (
    MIB,
    KvDemand,
    divide_kv,
    kv_bytes_of,
    open_bytes_of,
    wanted_bytes,
)

_ADVICE = (
    "Raise --memory-gib, or lower --max-model-len, --max-num-batched-tokens, --host-cache-gib, "
    "--host-gib, --arena-gib, --kv-cache-gib or --tuning-bytes."
)
_HOST_LINE = (
    "this memory is used as requests and adapters come; set --kv-cache-gib, --arena-gib or "
    "--host-cache-gib for more or less of it"
)
RESERVE_FRACTION = 0.1
"""The part of the free memory after loading the weights that is reserved for what the profile run
cannot see."""
ARENA_FRACTION = 0.25
"""The part of the memory after weights and activations, if the operator sets no size."""
MAX_HOST_ARENA_BYTES = 4 << 30
"""The most that this part may be on the host, which other programs share. Its pages take memory
once they hold an adapter."""
HOST_KV_FRACTION = 0.5
"""The part of the host's memory after all this that KV blocks get, if the operator sets no size."""

_HEAD_NAMES = {"eagle": "EAGLE head", "mtp": "multi-token head"}
"""Those with a cache of their own, for people, by source."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the engine's pools."""

    arena_bytes: int
    kv_groups: tuple[KvGroup, ...]
    kv_block_bytes: tuple[int, ...]
    """Of a block of each group."""
    host: HostPlan
    """What adapters and KV blocks have of host memory."""
    max_model_len: int
    """The longest sequence that fits; shorter than the model's only if the operator set no
    length."""
    lines: list[str]
    """The arithmetic, for the operator."""
    num_draft_blocks: int = 0
    """Blocks of the KV cache of a draft model or an EAGLE head."""
    border: Bounds | None = None
    """How far the border between the arena and the KV cache may move; None: it is fixed."""
    num_open_slots: int | None = None
    """Per group, the blocks that can be open at once, if complete blocks are quantized."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks that sequences can hold, over all groups."""
        return sum(group.num_usable for group in self.kv_groups)


def plan_memory(
    config: EngineConfig,
    memory: DeviceMemory,
    base: BaseDemand,
    proposers: ProposerDemand = ProposerDemand(),
) -> MemoryPlan:
    """Divide the memory that is free after loading the weights among the pools.

    Raises InsufficientMemory when less than the KV of one longest sequence would remain.
    """
    pools = _divide(config, memory, base, proposers)
    lines = list(_lines(pools, config, memory, base, proposers))
    shortage = _shortage(pools, config, memory, base, proposers)
    num_blocks = _divide_kv(pools, base, [shortage, *lines] if shortage else lines)
    lines += map(KvDemand.line, base.kv, num_blocks)
    groups = tuple(
        replace(demand.group, num_blocks=count + 1)
        for demand, count in zip(base.kv, num_blocks, strict=True)
    )
    max_model_len = _longest(base, num_blocks, config.kv_block_size)
    border = None
    if _may_move(config, memory, base):
        border, groups = plan_border(
            pools.arena, base.kv, groups, max_model_len, is_divided=divides_memory(memory)
        )
    if border is not None:
        lines.append(_border_line(border))
    host = plan_host(config, base.kv, num_blocks)
    lines += host.lines(is_host=memory.is_host)
    if memory.is_host:
        lines.append(_HOST_LINE)
    return MemoryPlan(
        arena_bytes=pools.arena,
        kv_groups=groups,
        kv_block_bytes=tuple(demand.bytes_per_block for demand in base.kv),
        host=host,
        max_model_len=max_model_len,
        border=border,
        lines=lines,
        num_draft_blocks=pools.num_draft_blocks,
        num_open_slots=base.kv[0].num_open_slots,
    )


def _may_move(config: EngineConfig, memory: DeviceMemory, base: BaseDemand) -> bool:
    """Whether the border may move: the operator fixed no side, and the pools can give memory
    back."""
    if config.arena_bytes is not None or config.kv_cache_bytes is not None:
        return False
    if open_bytes_of(base.kv):
        return False
    if divides_memory(memory):
        return config.kv_block_size % UNIT_BYTES == 0  # so that the parts of a block are aligned
    return CAN_GIVE_BACK


def divides_memory(memory: DeviceMemory) -> bool:
    """Whether arena and KV blocks lie in one memory if the border moves: on a device whose pages
    cannot be given back."""
    return not memory.is_host


def _border_line(border: Bounds) -> str:
    return (
        f"the border between arena and KV cache moves with the load: "
        f"arena {_mib(border.least_adapters)} to {_mib(border.most_adapters)}; "
        "set --arena-gib or --kv-cache-gib to fix it"
    )


@dataclass(frozen=True, slots=True)
class _Pools:
    """Bytes by purpose."""

    available: int
    """Besides the weights."""
    reserve: int
    usable: int
    """Bytes of all the following."""
    arena: int
    kv: int
    num_draft_blocks: int
    draft_kv: int

    @property
    def all_kv(self) -> int:
        return self.kv + self.draft_kv

    @property
    def do_fit(self) -> bool:
        return self.arena + self.all_kv <= self.usable


def _divide(
    config: EngineConfig, memory: DeviceMemory, base: BaseDemand, proposers: ProposerDemand
) -> _Pools:
    """Each pool takes its part of what the pools before it leave."""
    available = _available_bytes(config, memory, base, proposers)
    reserve = int(available * RESERVE_FRACTION)
    host_bytes = config.all_host_bytes if memory.is_host else 0
    usable = available - reserve - base.activation_bytes - base.graph_bytes - host_bytes
    arena = _arena_bytes(config, usable, is_host=memory.is_host)
    kv = _kv_bytes(config, base, proposers, usable - arena, is_host=memory.is_host)
    num_draft_blocks = kv // base.kv_block_bytes if proposers.block_bytes else 0
    return _Pools(
        available=available,
        reserve=reserve,
        usable=usable,
        arena=arena,
        kv=kv,
        num_draft_blocks=num_draft_blocks,
        draft_kv=num_draft_blocks * proposers.block_bytes,
    )


def _available_bytes(
    config: EngineConfig, memory: DeviceMemory, base: BaseDemand, proposers: ProposerDemand
) -> int:
    """Free memory less that of trainers, bounded by what the operator allows less the loaded
    weights."""
    free_bytes = memory.free_bytes - config.trainer_bytes
    if config.memory_bytes is None:
        return free_bytes
    loaded_bytes = base.weight_bytes + proposers.loaded_bytes
    return min(free_bytes, config.memory_bytes - loaded_bytes)


def _arena_bytes(config: EngineConfig, usable: int, *, is_host: bool) -> int:
    if config.arena_bytes is not None:
        return config.arena_bytes
    share = max(0, int(usable * ARENA_FRACTION))
    if is_host:
        share = min(share, MAX_HOST_ARENA_BYTES)
    return share // ARENA_UNIT_BYTES * ARENA_UNIT_BYTES


def _kv_bytes(
    config: EngineConfig, base: BaseDemand, proposers: ProposerDemand, left: int, *, is_host: bool
) -> int:
    """The base's share of what is left, at most what a full batch can use. On the host a part of
    that share, unless one sequence of the length that the operator set needs more."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    own = left * base.kv_block_bytes // (base.kv_block_bytes + proposers.block_bytes)
    open_bytes = open_bytes_of(base.kv)
    if is_host:
        needed = open_bytes + kv_bytes_of(base.kv, [demand.least for demand in base.kv])
        own = min(own, max(int(own * HOST_KV_FRACTION), needed))
    return max(0, min(own, open_bytes + wanted_bytes(base.kv, base.max_model_len)))


def _divide_kv(pools: _Pools, base: BaseDemand, lines: Sequence[str]) -> list[int]:
    """Each group's blocks. Raises InsufficientMemory; `lines` say where the rest went."""
    if not pools.do_fit:
        raise InsufficientMemory(
            f"Not enough memory: {'; '.join(lines)}; KV cache {_mib(pools.all_kv)}. {_ADVICE}"
        )
    num_blocks = divide_kv(max(0, pools.kv - open_bytes_of(base.kv)), base.kv)
    if num_blocks is None:
        least = " + ".join(str(demand.least) for demand in base.kv)
        raise InsufficientMemory(
            f"Not enough memory: one sequence of {base.max_model_len} tokens needs {least} "
            f"KV blocks, more than {_mib(pools.kv)} hold{_besides(base)}: {'; '.join(lines)}. "
            f"{_ADVICE}"
        )
    return num_blocks


def _shortage(
    pools: _Pools,
    config: EngineConfig,
    memory: DeviceMemory,
    base: BaseDemand,
    proposers: ProposerDemand,
) -> str:
    """What one sequence and an arena of its usual part need of the whole memory; empty if it is
    there."""
    kv = config.kv_cache_bytes
    if kv is None:
        kv = open_bytes_of(base.kv) + kv_bytes_of(base.kv, [demand.least for demand in base.kv])
        kv = kv * (base.kv_block_bytes + proposers.block_bytes) // base.kv_block_bytes
    arena = config.arena_bytes
    if arena is None:
        arena = int(kv * ARENA_FRACTION / (1 - ARENA_FRACTION))
    host_bytes = config.all_host_bytes if memory.is_host else 0
    used = kv + arena + base.activation_bytes + base.graph_bytes + host_bytes
    loaded = base.weight_bytes + proposers.loaded_bytes
    needed = loaded + int(used / (1 - RESERVE_FRACTION))
    has = loaded + pools.available
    return f"needs at least {_mib(needed)}, has {_mib(has)}" if needed > has else ""


def _besides(base: BaseDemand) -> str:
    if not (open_bytes := open_bytes_of(base.kv)):
        return ""
    return f" besides {_mib(open_bytes)} of unfinished blocks, less with fewer --max-num-seqs"


def _longest(base: BaseDemand, num_blocks: Sequence[int], block_size: int) -> int:
    """The longest sequence whose layers that see all of it have room for it."""
    held = [
        count * block_size
        for demand, count in zip(base.kv, num_blocks, strict=True)
        if demand.sees_all
    ]
    return min([base.max_model_len, *held])


def _lines(
    pools: _Pools,
    config: EngineConfig,
    memory: DeviceMemory,
    base: BaseDemand,
    proposers: ProposerDemand,
) -> Iterator[str]:
    """The arithmetic up to the KV cache."""
    weights, activations = _mib(base.weight_bytes), _mib(base.activation_bytes)
    if base.weight_format != "none":
        weights += f" ({base.weight_format})"
    yield f"available besides the weights {_mib(pools.available)}, weights {weights}"
    if config.trainer_bytes:
        yield f"left for trainers {_mib(config.trainer_bytes)}"
    yield f"reserve {_mib(pools.reserve)}, activations of a full step {activations}"
    yield f"adapter arena {_mib(pools.arena)}"
    if memory.is_host and config.host_bytes is None:
        yield f"host cache {_mib(config.adapter_host_bytes)}"
    drafters = {
        "draft model": (proposers.model_bytes, proposers.kv_block_bytes),
        _HEAD_NAMES[source_of(proposers.eagle_name)]: (
            proposers.eagle_bytes,
            proposers.eagle_block_bytes,
        ),
    }
    for name, (weight_bytes, block_bytes) in drafters.items():
        if weight_bytes:
            yield (
                f"{name} {_mib(weight_bytes)}, its KV cache {pools.num_draft_blocks} "
                f"blocks of {config.kv_block_size} tokens, {block_bytes} bytes each: "
                f"{_mib(pools.num_draft_blocks * block_bytes)}"
            )
    if base.graph_bytes:
        yield f"decode graphs {_mib(base.graph_bytes)}"
    if proposers.head_bytes:
        yield f"Medusa heads {_mib(proposers.head_bytes)}"
    if proposers.rounded_bytes:
        yield f"rounded weights for drafts {_mib(proposers.rounded_bytes)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
