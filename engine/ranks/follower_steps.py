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
from ..model.forward import PagedForward, StepAdapters, StepAdaptersBuilder, run_decoder
from ..model.inputs import SequenceChunk, make_inputs
from ..shards.rank_sums import RankSums
from ..transfers import to_device
from .commands import Chunk, RunChunks, unpack_tables
from .observed_attention import AttentionMasses
from .step_tokens import AwaitedTokens


class FollowerSteps:
    """The base without its output head, the KV cache and the arena of one follower."""

    def __init__(
        self,
        base: BaseModel,
        cache: KvCache,
        arena: Arena,
        ranks: RankSums,
        first_layers: FirstLayers | None,
    ) -> None:
        """`ranks`: of this one's stage. `first_layers`: of early exit; None without it."""
        self.masses = AttentionMasses()
        self._first_layers = first_layers
        self._base = base
        self._cache = cache
        self._arena = arena
        self._ranks = ranks
        self._adapters = StepAdaptersBuilder(
            LoraBatchBuilder(arena, base.device), base.part.layout, base.head_name
        )

    def run(self, command: RunChunks) -> None:
        """One forward pass, up to the last layer. Raises StaleExtent if an adapter is not where
        rank 0 has it."""
        chunks = command.chunks
        inputs = make_inputs(
            list(map(_sequence_chunk, chunks)),
            groups=self._cache.groups,
            block_size=self._cache.block_size,
            device=self._base.device,
        )
        if command.num_pending:
            pending = AwaitedTokens(command.num_pending, self._ranks)
            pending.fill(inputs.input_ids, to_device(pending.sources, self._base.device))
        adapters = self._build(chunks)
        paged = PagedForward.of(self._cache, inputs, adapters.lora)
        observations = self.masses.observations(command.observed)
        shared = self._base.shared_heads
        forward = ObservingForward(paged, observations, shared) if observations else paged
        with self._layers(command), self._base.ends.changed_by(adapters, inputs.input_ids) as ids:
            run_decoder(self._base.model, forward, ids, inputs.positions)
        if paged.states is not None:
            paged.states.commit()
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
