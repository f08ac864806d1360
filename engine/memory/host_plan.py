"""How much of the host's memory adapters and KV blocks have, and how far the border moves.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...adapters.block import ALIGNMENT_ELEMENTS
from ..config import EngineConfig
from ..kv.layout import shared_slot_bytes
from .border_plan import LEAST_PART, STEPS
from .budget import Bounds
from .kv_budget import MIB, KvDemand, divide_swap, kv_bytes_of

UNIT_BYTES = 4 * ALIGNMENT_ELEMENTS
"""Host memory for adapters has a multiple of these bytes, whatever their dtype."""
START_PART = 2
"""At the start adapters have one of so many equal parts."""


@dataclass(frozen=True, slots=True)
class SharedHostMemory:
    """Memory that adapters have at its beginning, and the slots of a KV group at its end."""

    bounds: Bounds
    group: int
    """The one whose slots come and go; those of the others have memory of their own."""
    slot_bytes: int

    @property
    def num_slots(self) -> int:
        """The most that the group can have."""
        return self.bounds.most_kv // self.slot_bytes


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The parts of host memory at the start."""

    adapter_bytes: int
    num_slots: tuple[int, ...]
    """Blocks per group, at most; empty: preempted sequences are computed again."""
    kv_bytes: int
    shared: SharedHostMemory | None = None
    """None: the border is fixed."""

    def lines(self, *, is_host: bool) -> Iterator[str]:
        """The text for the operator. `is_host`: the device is the host."""
        if self.shared is not None:
            bounds = self.shared.bounds
            yield (
                f"host memory {(bounds.total + self._other_bytes) / MIB:.1f} MiB: adapters "
                f"{bounds.least_adapters / MIB:.1f} to {bounds.most_adapters / MIB:.1f} MiB, KV "
                "blocks the rest; the border moves with the load"
            )
        elif self.kv_bytes:
            yield f"swap space on the host {self.kv_bytes / MIB:.1f} MiB"

    @property
    def _other_bytes(self) -> int:
        assert self.shared is not None
        return self.adapter_bytes + self.kv_bytes - self.shared.bounds.total


def plan_host(
    config: EngineConfig, demands: Sequence[KvDemand], num_blocks: Sequence[int]
) -> HostPlan:
    """`num_blocks`: of the device, per group of `demands`."""
    if config.host_bytes is None:
        slots = divide_swap(config.swap_bytes, demands, num_blocks)
        return HostPlan(config.adapter_host_bytes, slots, config.swap_bytes)
    adapter_bytes = config.host_bytes // START_PART // UNIT_BYTES * UNIT_BYTES
    kv_bytes = config.host_bytes - adapter_bytes
    slots = divide_swap(kv_bytes, demands, num_blocks)
    fixed = HostPlan(adapter_bytes, slots, kv_bytes)
    moving = [index for index, demand in enumerate(demands) if demand.sees_all]
    if len(moving) != 1:
        return fixed
    (group,) = moving
    others = kv_bytes_of(demands, slots) - slots[group] * demands[group].bytes_per_block
    shared = _share(config.host_bytes - others, group, demands[group].bytes_per_block)
    if not shared.bounds.least_adapters <= adapter_bytes <= shared.bounds.most_adapters:
        return fixed
    slots = (*slots[:group], shared.num_slots, *slots[group + 1 :])
    return HostPlan(adapter_bytes, slots, kv_bytes, shared)


def _share(num_bytes: int, group: int, block_bytes: int) -> SharedHostMemory:
    total = _units(num_bytes)
    slot_bytes = shared_slot_bytes(block_bytes)
    most_adapters = _units(total - max(total // LEAST_PART, slot_bytes))
    step = max(_units(total // STEPS), _units(slot_bytes) + UNIT_BYTES)
    bounds = Bounds(total, _units(total // LEAST_PART), total - most_adapters, step)
    return SharedHostMemory(bounds, group, slot_bytes)


def _units(num_bytes: int) -> int:
    return num_bytes // UNIT_BYTES * UNIT_BYTES
