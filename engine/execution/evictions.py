"""Observes attention in a step, and compacts the caches that it completes to their budget.

A step's own output never depends on what it evicts: its queries attend before. Nothing is written
over: the kept tokens go to other blocks, and a step that fails may run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.attention import AttentionOptions
from ...kernels.kv_eviction import attention_mass, most_attended, move_tokens
from ...kernels.kv_pages import KvPages
from ...kernels.lora_batch import LoraBatch
from ..kv.cache import KvCache
from ..kv.eviction import NEVER, EvictionPlan
from ..kv.sequence_blocks import BlockTable
from ..kv_policy import EvictionMethod
from ..model.forward import PagedForward
from ..model.step_states import StepStates
from ..request import Request
from ..scheduling.batch import ScheduledSequence
from ..shards.shared_heads import SharedHeads
from ..transfers import to_device

SNAPKV_POOL_WIDTH = 7
"""Neighbors of an attended token are kept with it: it means little without them."""

Mass = dict[int, Tensor]
"""By layer the attention that cached tokens received: fp32 `[num_kv_heads, num_tokens]`."""


class Compaction(NamedTuple):
    """Which of a sequence's tokens stay, and where they go."""

    target: BlockTable
    budget: int
    """Tokens per layer and KV head."""
    num_recent: int
    """The last of them, which stay whatever attention they received."""
    pool_width: int
    """See `most_attended`."""


@dataclass(slots=True)
class Observation:
    """What the tokens of one scheduled sequence attend to."""

    request_id: str
    rows: slice
    """The rows of the observed tokens in the step."""
    first_place: int
    """The place of the first of them in the cache."""
    num_cached: int
    """Tokens in the cache once the step has run."""
    table: BlockTable
    before: Mass
    """Of the tokens observed before; empty if these are the first."""
    is_last: bool
    """Whether the masses are of no use after the step."""
    compaction: Compaction | None
    """None: the step evicts nothing."""
    after: Mass = field(default_factory=dict)

    def note(
        self,
        layer: int,
        q: Tensor,
        keys: KvPages,
        options: AttentionOptions,
        shared: SharedHeads | None = None,
    ) -> None:
        """Add what a layer's queries `[num_tokens, num_heads, dim]` of the step attend to.

        `shared`: the ranks whose queries read the same KV head.
        """
        blocks = keys.gather(_blocks(self.table, q.device))
        cached = blocks.flatten(0, 1)[: self.num_cached]
        mass = attention_mass(q[self.rows], cached, self.first_place, options)
        if shared is not None:
            mass = shared.add(mass)
        if (before := self.before.get(layer)) is not None:
            mass[:, : before.shape[1]] += before
        self.after[layer] = mass

    def settle(self, cache: KvCache) -> None:
        """After the forward: compact the cache if it is time. `after` is then what to keep."""
        if (compaction := self.compaction) is not None:
            self.after = {layer: self._compact(layer, cache, compaction) for layer in self.after}
        if self.is_last:
            self.after = {}

    def _compact(self, layer: int, cache: KvCache, compaction: Compaction) -> Tensor:
        """Move the kept tokens of one layer to the targets; returns their mass."""
        mass = self.after[layer]
        target, budget, num_recent, pool_width = compaction
        kept = most_attended(mass, budget=budget, num_recent=num_recent, pool_width=pool_width)
        sources = _slots(self.table, cache.block_size, self.num_cached, mass.device)[kept]
        targets = _slots(target, cache.block_size, budget, mass.device)
        for pages in (cache.keys[layer], cache.values[layer]):
            move_tokens(pages, sources, targets)
        return mass.gather(1, kept)


class ObservingForward:
    """A forward pass over the paged cache that notes what some of its tokens attend to."""

    def __init__(
        self,
        forward: PagedForward,
        observations: Sequence[Observation],
        shared: SharedHeads | None = None,
    ) -> None:
        """`shared`: see `Observation.note`."""
        self._forward = forward
        self._observations = observations
        self._shared = shared

    @property
    def lora(self) -> LoraBatch | None:
        return self._forward.lora

    @property
    def is_captured(self) -> bool:
        return False

    @property
    def states(self) -> StepStates | None:
        return self._forward.states

    @property
    def rotary_rows(self) -> Tensor | None:
        return self._forward.rotary_rows

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor | int, options: AttentionOptions
    ) -> Tensor:
        """See `ForwardContext.attend`."""
        out = self._forward.attend(layer_index, q, k, v, options)
        keys = self._forward.cache.keys[layer_index]
        for observation in self._observations:
            observation.note(layer_index, q, keys, options, self._shared)
        return out


def observe(sequences: Iterable[ScheduledSequence]) -> dict[Request, Observation]:
    """The observations that the step of these sequences, in this order, has to make."""
    observations: dict[Request, Observation] = {}
    row = 0
    for sequence in sequences:
        if (observation := _observation(sequence, row)) is not None:
            observations[sequence.request] = observation
        row += sequence.num_tokens
    return observations


def _observation(sequence: ScheduledSequence, row: int) -> Observation | None:
    """`row`: the sequence's first in the step. None: nothing is observed of it."""
    request, start = sequence.request, sequence.start
    kv, plan = request.kv, request.kv.eviction
    if plan is None:
        return None
    first = max(plan.first_observed, start)
    end = min(plan.end_observed, sequence.end)
    if first >= end:
        return None
    is_continued = plan.first_observed < start
    return Observation(
        request.request_id,
        rows=slice(row + first - start, row + end - start),
        first_place=first - kv.num_evicted,
        num_cached=sequence.context_len,
        table=kv.tables[0],
        before=request.attention_mass if is_continued else {},
        is_last=plan.next_after(sequence.end) == NEVER,
        compaction=_compaction(kv.targets, plan) if sequence.compacts else None,
    )


def _compaction(targets: Sequence[BlockTable], plan: EvictionPlan) -> Compaction:
    (target,) = targets
    is_snapkv = plan.method is EvictionMethod.SNAPKV
    return Compaction(target, plan.budget, plan.num_recent, SNAPKV_POOL_WIDTH if is_snapkv else 1)


def _slots(table: BlockTable, block_size: int, num_tokens: int, device: torch.device) -> Tensor:
    """Those of a table's first tokens."""
    firsts = _blocks(table, device)[:, None] * block_size
    slots = firsts + torch.arange(block_size, device=device)
    return slots.flatten()[:num_tokens]


def _blocks(table: BlockTable, device: torch.device) -> Tensor:
    return to_device(table.tolist(), device, torch.int64)
