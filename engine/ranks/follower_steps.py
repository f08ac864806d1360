"""Runs a follower's part of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ...adapters.arena import Arena
from ...kernels.lora_batch import AdapterRun, LoraBatchBuilder, LoraNeeds
from ..errors import StaleExtent
from ..execution.decode_graphs import DecodeGraphs
from ..execution.evictions import ObservingForward
from ..kv.cache import KvCache
from ..model.adapter_runs import adapter_runs
from ..model.base_model import BaseModel
from ..model.forward import (
    PagedForward,
    StepAdapters,
    StepAdaptersBuilder,
    run_decoder,
    run_model,
)
from ..model.inputs import SequenceChunk, make_inputs
from ..model.layer_subset import LayerSubset
from ..shards.rank_sums import RankSums
from ..transfers import to_device
from .commands import Chunk, Replayed, RunChunks, unpack_tables
from .observed_attention import AttentionMasses
from .step_tokens import AwaitedTokens


class FollowerSteps:
    """The base, the KV cache and the arena of one follower."""

    def __init__(
        self,
        base: BaseModel,
        cache: KvCache,
        arena: Arena,
        ranks: RankSums,
        subsets: Mapping[str, LayerSubset],
        graphs: DecodeGraphs | None,
    ) -> None:
        """`ranks`: of this one's stage. `subsets`: of the proposers that compute some layers alone.
        `graphs`: those that every rank has; None without any."""
        self.masses = AttentionMasses()
        self._subsets = subsets
        self._graphs = graphs
        self._base = base
        self._cache = cache
        self._arena = arena
        self._ranks = ranks
        self._adapters = StepAdaptersBuilder(
            LoraBatchBuilder(arena, base.device), base.layout, base.head_name
        )

    def capture(self) -> None:
        """Capture the graphs of the first steps, together with rank 0."""
        if self._graphs:
            self._graphs.capture(keeps_hidden_states=False)

    def run(self, command: RunChunks) -> None:
        """One forward pass. Raises StaleExtent if an adapter is not where rank 0 has it."""
        pending = None
        if command.num_pending:
            pending = AwaitedTokens(command.num_pending, self._ranks)
        if command.replayed:
            self._replay(command.chunks, command.replayed, pending)
        else:
            self._run_eagerly(command, pending)

    def _replay(
        self, chunks: Sequence[Chunk], replayed: Replayed, pending: AwaitedTokens | None
    ) -> None:
        """Its logits are not read: a graph of a follower is that of rank 0, which waits for the
        output head anyway."""
        assert self._graphs is not None, "the ranks have one configuration"
        rows = [self._run_of(chunk).row for chunk in chunks]
        needs = LoraNeeds(replayed.rank, replayed.has_vectors, replayed.has_experts)
        self._graphs.run(list(map(_sequence_chunk, chunks)), rows, needs, pending)

    def _run_eagerly(self, command: RunChunks, pending: AwaitedTokens | None) -> None:
        """Up to the last layer, if rank 0 has the whole output head."""
        chunks = list(map(_sequence_chunk, command.chunks))
        inputs = make_inputs(
            chunks,
            groups=self._cache.groups,
            block_size=self._cache.block_size,
            device=self._base.device,
        )
        if pending is not None:
            pending.fill(inputs.input_ids, to_device(pending.sources, self._base.device))
        adapters = self._build(chunks, list(map(self._run_of, command.chunks)))
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
        if command.drafting is None:
            return nullcontext()
        return self._subsets[command.drafting].only()

    def _build(self, chunks: Sequence[SequenceChunk], runs: Sequence[AdapterRun]) -> StepAdapters:
        num_decodes = sum(run.num_tokens == 1 for run in runs)
        computed, kept = adapter_runs(chunks, runs)
        if not self._base.ends.is_head_divided:
            kept = []
        return self._adapters.build(computed, kept, num_decodes=num_decodes)

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
        num_base_tokens=chunk.num_base_tokens,
    )
