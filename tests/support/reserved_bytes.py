"""The memory of the engine's adapters, relative to the sum of their actual sizes.

It counts the arena, the tables of its rows and the loader threads' buffers. The adapters include
all kinds that waste memory in systems with slots of one size. Nothing is loaded from disk, because
the bytes do not depend on the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from loraplex.adapters.arena import Arena
from loraplex.adapters.block import BlockPlan, Extra, ExtraKind
from loraplex.adapters.block_reader import PIECE_ELEMENTS
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, Projection, Slice, SliceKind
from loraplex.engine.config import EngineConfig

NUM_LAYERS = 32
NUM_EXPERTS = 8
VOCABULARY = 512
HIDDEN, INTERMEDIATE, KV = 128, 352, 40
"""KV is no multiple of the alignment, so that padding shows."""


class ReservedBytes(NamedTuple):
    """Where the memory goes."""

    true: int
    """Elements of all adapters' tensors, in the serving type."""
    arena: int
    table: int
    staging: int

    @property
    def ratio(self) -> float:
        return (self.arena + self.table + self.staging) / self.true


def make_mixed_layout() -> BaseLayout:
    """A model of 32 layers, every fourth of which has experts, with embedding and output head."""
    projections = [
        Projection((Slice("embed_tokens", VOCABULARY, HIDDEN, SliceKind.EMBEDDING),)),
    ]
    for layer in range(NUM_LAYERS):
        widths = {"q": HIDDEN, "k": KV, "v": KV}
        parts = tuple(Slice(f"{layer}.{name}", HIDDEN, width) for name, width in widths.items())
        projections += [Projection(parts), Projection((Slice(f"{layer}.o", HIDDEN, HIDDEN),))]
        if layer % 4 == 3:
            up = Slice(f"{layer}.up", HIDDEN, INTERMEDIATE, SliceKind.EXPERTS, NUM_EXPERTS)
            projections.append(Projection((up,)))
        else:
            gate_up = tuple(Slice(f"{layer}.{n}", HIDDEN, INTERMEDIATE) for n in ("gate", "up"))
            down = Slice(f"{layer}.down", INTERMEDIATE, HIDDEN)
            projections += [Projection(gate_up), Projection((down,))]
    projections.append(Projection((Slice("lm_head", HIDDEN, VOCABULARY),)))
    return BaseLayout("base", tuple(projections))


def mixed_plans(layout: BaseLayout) -> Iterator[BlockPlan]:
    """One adapter of each sort."""
    linear = [i for i, part in enumerate(layout.slices) if part.kind is SliceKind.LINEAR]
    names = {index: layout.slices[index].name.rpartition(".")[2] for index in linear}
    for rank in (4, 16, 64, 256):
        yield BlockPlan(layout, dict.fromkeys(linear, rank))
    for rank in (4, 16, 64, 256):
        yield BlockPlan(layout, {i: rank for i in linear if names[i] in ("q", "v")})
    for rank in (16, 64):
        two = [i for i in linear if layout.slices[i].name.split(".")[0] in ("7", "19")]
        yield BlockPlan(layout, dict.fromkeys(two, rank))
    yield BlockPlan(layout, {i: (4, 16, 64)[place % 3] for place, i in enumerate(linear)})
    experts = [i for i, part in enumerate(layout.slices) if part.kind is SliceKind.EXPERTS]
    for rank in (4, 16):
        yield BlockPlan(layout, dict.fromkeys(experts, rank))
    magnitudes = tuple(
        Extra(i, ExtraKind.MAGNITUDE, (layout.slices[i].out_features,)) for i in linear
    )
    yield BlockPlan(layout, dict.fromkeys(linear, 8), magnitudes)
    rows = Extra(0, ExtraKind.TOKEN_ROWS, (16, HIDDEN), tuple(range(16)))
    yield BlockPlan(layout, {0: 16, linear[-1]: 16}, (rows,))
    head = Extra(linear[-1], ExtraKind.MATRIX, (VOCABULARY, HIDDEN))
    yield BlockPlan(layout, dict.fromkeys(linear[:4], 16), (head,))


def true_elements(plan: BlockPlan) -> int:
    """Elements of the tensors that the adapter's owner has pushed."""
    slices = plan.layout.slices
    matrices = sum(
        rank * slices[i].num_experts * (slices[i].in_features + slices[i].out_features)
        for i, rank in plan.ranks.items()
    )
    return matrices + sum(extra.num_elements for extra in plan.auxiliary)


def measure_reserved_bytes(dtype: torch.dtype = torch.bfloat16) -> ReservedBytes:
    """Fill an arena with one adapter of each sort."""
    layout = make_mixed_layout()
    plans = list(mixed_plans(layout))
    capacity_bytes = sum(plan.num_elements for plan in plans) * dtype.itemsize
    arena = Arena(layout, capacity_bytes, dtype, torch.device("cpu"))
    for index, plan in enumerate(plans):
        key = AdapterKey("tenant", f"sha256:{index}")
        placement = arena.place(key, plan.num_elements, plan.table, plan.placed_auxiliary)
        assert placement is not None, "the arena is as large as all of them"
        arena.publish(placement)
    num_threads = EngineConfig("model").num_loader_threads
    return ReservedBytes(
        true=sum(map(true_elements, plans)) * dtype.itemsize,
        arena=arena.used_bytes,
        table=arena.table.nbytes + arena.vectors.nbytes,
        staging=num_threads * PIECE_ELEMENTS * (torch.float32.itemsize + torch.float32.itemsize),
    )


def reserved_over_true() -> float:
    """Reserved bytes over true bytes: 1 is what there is to reach."""
    return measure_reserved_bytes().ratio
