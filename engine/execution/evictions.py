"""Observes attention in a step, and compacts the caches that it completes to their budget.

A step's own output never depends on what it evicts: its queries attend before. Nothing is written
over: the kept tokens go to other blocks, and a step that fails may run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from ..scheduling.batch import ScheduledSequence
from ..transfers import to_device

SNAPKV_POOL_WIDTH = 7
"""Neighbors of an attended token are kept with it: it means little without them."""

Mass = dict[int, Tensor]
"""By layer the attention that cached tokens received: fp32 `[num_kv_heads, num_tokens]`."""


@dataclass(slots=True)
class Observation:
    """What the tokens of one scheduled sequence attend to."""

    sequence: ScheduledSequence
    plan: EvictionPlan
    rows: slice
    """The rows of the observed tokens in the step."""
    first_place: int
    """The place of the first of them in the cache."""
    table: BlockTable
    before: Mass
    """Of the tokens observed before; empty if these are the first."""
    after: Mass = field(default_factory=dict)

    @property
    def num_cached(self) -> int:
        """Tokens in the cache once the step has run."""
        return self.sequence.context_len

    def note(self, layer: int, q: Tensor, keys: KvPages, options: AttentionOptions) -> None:
        """Add what a layer's queries `[num_tokens, num_heads, dim]` of the step attend to."""
        blocks = keys.gather(_blocks(self.table, q.device))
        cached = blocks.flatten(0, 1)[: self.num_cached]
        mass = attention_mass(q[self.rows], cached, self.first_place, options)
        if (before := self.before.get(layer)) is not None:
            mass[:, : before.shape[1]] += before
        self.after[layer] = mass

    def settle(self, cache: KvCache) -> None:
        """After the forward: compact the cache if it is time, and keep the masses."""
        request = self.sequence.request
        if self.sequence.compacts:
            self.after = {layer: self._compact(layer, cache) for layer in self.after}
        is_last = self.plan.next_after(self.sequence.end) == NEVER
        request.attention_mass = {} if is_last else self.after

    def _compact(self, layer: int, cache: KvCache) -> Tensor:
        """Move the kept tokens of one layer to the targets; returns their mass."""
        plan, mass = self.plan, self.after[layer]
        is_snapkv = plan.method is EvictionMethod.SNAPKV
        kept = most_attended(
            mass,
            budget=plan.budget,
            num_recent=plan.num_recent,
            pool_width=SNAPKV_POOL_WIDTH if is_snapkv else 1,
        )
        (target,) = self.sequence.request.kv.targets
        sources = _slots(self.table, cache.block_size, self.num_cached, mass.device)[kept]
        targets = _slots(target, cache.block_size, plan.budget, mass.device)
        for pages in (cache.keys[layer], cache.values[layer]):
            move_tokens(pages, sources, targets)
        return mass.gather(1, kept)


class ObservingForward:
    """A forward pass over the paged cache that notes what some of its tokens attend to."""

    def __init__(self, forward: PagedForward, observations: Sequence[Observation]) -> None:
        self._forward = forward
        self._observations = observations

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
        for observation in self._observations:
            observation.note(layer_index, q, self._forward.cache.keys[layer_index], options)
        return out


def observe(sequences: Sequence[ScheduledSequence]) -> list[Observation]:
    """The observations that the step of these sequences, in this order, has to make."""
    observations: list[Observation] = []
    row = 0
    for sequence in sequences:
        kv, start = sequence.request.kv, sequence.start
        if kv.eviction is not None:
            first = max(kv.eviction.first_observed, start)
            end = min(kv.eviction.end_observed, sequence.end)
            is_continued = kv.eviction.first_observed < start
            if first < end:
                observations.append(
                    Observation(
                        sequence,
                        kv.eviction,
                        rows=slice(row + first - start, row + end - start),
                        first_place=first - kv.num_evicted,
                        table=kv.tables[0],
                        before=sequence.request.attention_mass if is_continued else {},
                    )
                )
        row += sequence.num_tokens
    return observations


def _slots(table: BlockTable, block_size: int, num_tokens: int, device: torch.device) -> Tensor:
    """Those of a table's first tokens."""
    firsts = _blocks(table, device)[:, None] * block_size
    slots = firsts + torch.arange(block_size, device=device)
    return slots.flatten()[:num_tokens]


def _blocks(table: BlockTable, device: torch.device) -> Tensor:
    return to_device(table.tolist(), device, torch.int64)
