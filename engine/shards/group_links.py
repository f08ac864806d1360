"""Connects one rank to the others of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .rank_place import GroupShape
from .rank_pulses import RankPulse, RankPulses
from .rank_sums import RankSums, connect_ranks, open_gloo
from .stage_links import StageLinks

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


class GroupLinks(NamedTuple):
    """The connections of one rank."""

    sums: RankSums
    """To the ranks of its stage."""
    stages: StageLinks | None
    """To the other stages; None: there is one stage."""
    pulse: RankPulse
    """Its signs of life."""


def connect_group(
    store: Store,
    shape: GroupShape,
    rank: int,
    device: torch.device,
    pulses: RankPulses | None = None,
) -> GroupLinks:
    """Connect this rank to the others. Waits for all of them.

    `device`: of this rank; the CPU if there are several stages. `pulses`: the signs of life that
    the group shares; None: nobody watches.
    """
    pulse = (pulses or RankPulses(shape.size)).of(rank)
    if shape.num_stages == 1:
        return GroupLinks(connect_ranks(store, shape.place(rank), device, pulse), None, pulse)
    from torch._C._distributed_c10d import PrefixStore  # not every PyTorch has it

    own = PrefixStore(f"stage{shape.stage(rank).stage}", store)
    sums = connect_ranks(own, shape.place(rank), device, pulse)
    group = open_gloo(PrefixStore("stages", store), rank, shape.size)
    stages = StageLinks(group, shape, rank, pulse)
    stages.tell_all(b"")  # no rank reads the store after this
    return GroupLinks(sums, stages, pulse)
