"""How far the border between the arena and the KV cache may move. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...adapters.block import ALIGNMENT_ELEMENTS
from ..kv.layout import KvGroup
from .budget import Bounds
from .kv_budget import KvDemand

ARENA_UNIT_BYTES = 4 * ALIGNMENT_ELEMENTS
"""The remainder of such a unit could hold no adapter of any dtype, and would count as used."""
LEAST_PART = 16
"""Each side keeps this part of the memory."""
STEPS = 32
"""The border moves by this part of the memory."""
MOST_BATCHES = 2
"""The KV cache grows to at most the blocks of so many full batches: more prefixes than that are
seldom asked for again, and each block takes bookkeeping."""


def plan_border(
    arena_bytes: int,
    demands: Sequence[KvDemand],
    groups: tuple[KvGroup, ...],
    max_model_len: int,
    *,
    is_divided: bool = False,
) -> tuple[Bounds | None, tuple[KvGroup, ...]]:
    """The bounds, and the groups with the blocks that may come and go; None if nothing can move.

    The blocks of the layers that see all tokens move. `groups`: as they are at the start, in the
    order of `demands`. `is_divided`: both sides lie in one memory, see `DividedMemory`.
    """
    moving = [index for index, demand in enumerate(demands) if demand.sees_all]
    if len(moving) != 1:
        return None, groups
    (index,) = moving
    demand, group = demands[index], groups[index]
    size, num_blocks = demand.bytes_per_block, group.num_usable
    total = arena_bytes + num_blocks * size
    most_blocks = max(num_blocks, MOST_BATCHES * demand.wanted(demand.max_model_len))
    least_adapters = _units(max(total // LEAST_PART, total - most_blocks * size))
    least_blocks = max(demand.held(max_model_len), -(-total // LEAST_PART // size))
    most_adapters = _units(total - least_blocks * size)
    step = max(_units(total // STEPS), _units(size) + ARENA_UNIT_BYTES)
    if not least_adapters <= arena_bytes <= most_adapters or most_adapters - least_adapters < step:
        return None, groups
    bounds = Bounds(total, least_adapters, total - most_adapters, step)
    bordered = replace(
        group,
        num_more=max((total - least_adapters) // size - num_blocks, 0),
        num_less=max(num_blocks - least_blocks, 0),
        gives_end=is_divided,
    )
    return bounds, (*groups[:index], bordered, *groups[index + 1 :])


def _units(num_bytes: int) -> int:
    """Whole units of the arena, as the arena rounds."""
    return num_bytes // ARENA_UNIT_BYTES * ARENA_UNIT_BYTES
