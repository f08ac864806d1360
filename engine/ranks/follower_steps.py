"""Runs a follower's part of each step."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.arena import Arena
from ...kernels.lora_batch import AdapterRun, LoraBatchBuilder
from ..errors import StaleExtent
from ..kv.cache import KvCache
from ..model.base_model import BaseModel
from ..model.forward import PagedForward, StepAdapters, StepAdaptersBuilder, run_decoder
from ..model.inputs import SequenceChunk, make_inputs
from .commands import Chunk, unpack_tables


class FollowerSteps:
    """The base without its output head, the KV cache and the arena of one follower."""

    def __init__(self, base: BaseModel, cache: KvCache, arena: Arena) -> None:
        self._base = base
        self._cache = cache
        self._arena = arena
        self._adapters = StepAdaptersBuilder(
            LoraBatchBuilder(arena, base.device), base.part.layout, base.head_name
        )

    def run(self, chunks: Sequence[Chunk]) -> None:
        """One forward pass, up to the last layer. Raises StaleExtent if an adapter is not where
        rank 0 has it."""
        inputs = make_inputs(
            list(map(_sequence_chunk, chunks)),
            groups=self._cache.groups,
            block_size=self._cache.block_size,
            device=self._base.device,
        )
        adapters = self._build(chunks)
        forward = PagedForward.of(self._cache, inputs, adapters.lora)
        with self._base.ends.changed_by(adapters, inputs.input_ids) as token_ids:
            run_decoder(self._base.model, forward, token_ids, inputs.positions)
        if forward.states is not None:
            forward.states.commit()

    def _build(self, chunks: Sequence[Chunk]) -> StepAdapters:
        runs = [self._run_of(chunk) for chunk in chunks]
        num_decodes = sum(run.num_tokens == 1 for run in runs)
        return self._adapters.build(runs, (), num_decodes=num_decodes)

    def _run_of(self, chunk: Chunk) -> AdapterRun:
        leased = chunk.leased
        if leased is None:
            return AdapterRun(len(chunk.token_ids))
        if self._arena.published.get(leased.row) != (leased.key, leased.generation):
            raise StaleExtent
        return AdapterRun(len(chunk.token_ids), leased.row, leased.generation)


def _sequence_chunk(chunk: Chunk) -> SequenceChunk:
    return SequenceChunk(
        chunk.token_ids,
        chunk.start,
        unpack_tables(chunk.tables),
        tree=chunk.tree,
        is_prompt=chunk.is_prompt,
        num_evicted=chunk.num_evicted,
        rotary_start=chunk.rotary_start,
    )
