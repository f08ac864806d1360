"""Runs a follower's part of each step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ...adapters.arena import Arena
from ...kernels.lora_batch import AdapterRun, LoraBatchBuilder
from ..errors import StaleExtent
from ..execution.evictions import ObservingForward
from ..kv.cache import KvCache
from ..model.base_model import BaseModel
from ..model.first_layers import FirstLayers
from ..model.forward import (
    PagedForward,
    StepAdapters,
    StepAdaptersBuilder,
    run_decoder,
    run_model,
)
from ..model.inputs import SequenceChunk, make_inputs
from .commands import Chunk, RunChunks, unpack_tables
from .observed_attention import AttentionMasses


class FollowerSteps:
    """The base, the KV cache and the arena of one follower."""

    def __init__(
        self, base: BaseModel, cache: KvCache, arena: Arena, first_layers: FirstLayers | None
    ) -> None:
        """`first_layers`: of early exit; None without it."""
        self.masses = AttentionMasses()
        self._first_layers = first_layers
        self._base = base
        self._cache = cache
        self._arena = arena
        self._adapters = StepAdaptersBuilder(
            LoraBatchBuilder(arena, base.device), base.layout, base.head_name
        )

    def run(self, command: RunChunks) -> None:
        """One forward pass; up to the last layer, if rank 0 has the whole output head. Raises
        StaleExtent if an adapter is not where rank 0 has it."""
        chunks = command.chunks
        inputs = make_inputs(
            list(map(_sequence_chunk, chunks)),
            groups=self._cache.groups,
            block_size=self._cache.block_size,
            device=self._base.device,
        )
        adapters = self._build(chunks)
        paged = PagedForward.of(self._cache, inputs, adapters.lora)
        observations = self.masses.observations(command.observed)
        shared = self._base.shared_heads
        forward = ObservingForward(paged, observations, shared) if observations else paged
        with self._layers(command), self._base.ends.changed_by(adapters, inputs.input_ids) as ids:
            if self._base.ends.is_head_divided:
                run_model(self._base.model, forward, ids, inputs.positions, inputs.logits_rows)
            else:
                run_decoder(self._base.model, forward, ids, inputs.positions)
        for observation in observations:
            observation.settle(self._cache)
        self.masses.keep(observations)

    def _layers(self, command: RunChunks) -> AbstractContextManager[None]:
        if not command.is_early_exit:
            return nullcontext()
        assert self._first_layers is not None, "the ranks have one configuration"
        return self._first_layers.only()

    def _build(self, chunks: Sequence[Chunk]) -> StepAdapters:
        runs = [self._run_of(chunk) for chunk in chunks]
        num_decodes = sum(run.num_tokens == 1 for run in runs)
        kept: list[AdapterRun] = []
        if self._base.ends.is_head_divided:
            kept = [
                run._replace(num_tokens=chunk.num_logits_rows)
                for run, chunk in zip(runs, chunks, strict=True)
            ]
        return self._adapters.build(runs, kept, num_decodes=num_decodes)

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
        chunk.num_logits_rows,
        tree=chunk.tree,
        is_prompt=chunk.is_prompt,
        num_evicted=chunk.num_evicted,
        rotary_start=chunk.rotary_start,
    )
