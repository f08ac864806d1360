"""Runs one scheduled step: tensors in, logits out. It makes no scheduling decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...adapters.arena import Arena
from ...adapters.manager import Lease
from ...kernels.lora_batch import BASE_ROW, AdapterRun, LoraBatchBuilder, LoraNeeds
from ..kv.cache import KvCache
from ..kv.layout import KvOperation
from ..kv.sequence_blocks import BlockTable, SequenceBlocks
from ..model.adapter_runs import adapter_runs
from ..model.base_model import BaseModel
from ..model.drafting_part import DraftingPart
from ..model.forward import PagedForward, StepAdapters, StepAdaptersBuilder, run_model
from ..model.inputs import (
    DecodeChunks,
    Integers,
    PendingTokens,
    SampledTokens,
    SequenceChunk,
    TableRows,
    integers,
    make_inputs,
)
from ..model.layer_features import LayerFeatures
from ..model.output_head import head_inputs
from ..model.step_states import PagedStates
from ..request import Request
from ..scheduling.batch import ScheduledBatch, ScheduledSequence
from ..transfers import HostCopy, to_device
from .decode_graphs import NO_NEEDS, DecodeGraphs
from .evictions import Observation, ObservingForward, observe
from .execution import Sampled
from .pooling import last_hidden_states
from .sampler import finite_rows


class StepOutput(NamedTuple):
    """The step's output for its logits rows, those of each sequence adjacent and in its order."""

    logits: Tensor
    """fp32 `[num_logits_rows, vocab_size]`; valid until the next step."""
    are_finite: HostCopy
    """bool `[num_logits_rows]`: see `finite`."""
    hidden_states: Tensor | None = None
    """`[num_logits_rows, hidden_size]`: the input of the output head; None unless requested."""
    token_states: Tensor | None = None
    """`[num_tokens, hidden_size]` for all rows, kept or not: the output of the last layer; None in
    an eager step unless an embedding is requested."""
    features: Tensor | None = None
    """`[num_tokens, size]` for all rows: see `LayerFeatures`; None unless requested."""

    @property
    def finite(self) -> list[bool]:
        """For each row whether all of its logits are numbers; waits for the device."""
        finite: list[bool] = self.are_finite.read().tolist()
        return finite


class ModelRunner:
    """The base model, its KV cache and its adapters' arena."""

    def __init__(
        self, base: BaseModel, cache: KvCache, arena: Arena, graphs: DecodeGraphs | None = None
    ) -> None:
        """`graphs`: None where decode steps run kernel by kernel."""
        self.keeps_hidden_states = False
        self.features: LayerFeatures | None = None
        """What steps give of the hidden states between layers; None: nothing."""
        self.watches: Callable[[Request], bool] = lambda _request: True
        """Whether a request needs them. A step without graphs skips them if no request does."""
        self.num_graph_steps = 0
        self.num_eager_decodes = 0
        """The number of decode-only steps that no graph served, if graphs are enabled."""
        self._base = base
        self._graphs = graphs
        self._graphs_within: dict[str, DecodeGraphs] = {}
        self._cache = cache
        self._arena = arena
        self._adapters = StepAdaptersBuilder(
            LoraBatchBuilder(arena, base.device), base.layout, base.head_name, base.absorbed
        )
        self._table_rows = [TableRows() for _ in cache.groups]
        # While the same sequences decode, a step has the adapters of the one before: a lease fixes
        # its adapter's place on the device.
        self._needed: tuple[Sequence[Lease | None], LoraNeeds | None] = ((), NO_NEEDS)
        self._adapter_rows: tuple[Sequence[Lease | None], list[int]] = ((), [])
        self._step = StepRequests.of(())
        self._built: tuple[_AdapterRows, StepAdapters] | None = None

    @property
    def cache(self) -> KvCache:
        return self._cache

    @property
    def kv_bytes(self) -> int:
        """The size of the KV cache."""
        return self._cache.num_bytes

    @property
    def max_graph_rows(self) -> int | None:
        """The most rows that a captured graph computes; None where there are no graphs."""
        return self._graphs.max_rows if self._graphs else None

    def graphs_within(
        self, name: str, context: Callable[[], AbstractContextManager[None]]
    ) -> DecodeGraphs | None:
        """Graphs of the model as it is inside `context`, for `replay`; None where there are none.

        `name`: for the operator.
        """
        if self._graphs is None:
            return None
        graphs = self._graphs_within[name] = self._graphs.within(context)
        return graphs

    def capture(self) -> list[str]:
        """Capture the graphs; once, after `keeps_hidden_states` and `features` are set and before
        the first step.

        Returns a summary for the operator.
        """
        if self._graphs is None:
            return []
        lines = [
            self._graphs.capture(
                keeps_hidden_states=self.keeps_hidden_states, features=self.features
            )
        ]
        for name, graphs in self._graphs_within.items():
            lines.append(f"{name}: {graphs.capture(keeps_hidden_states=False)}")
        return lines

    def is_current(self, sequence: ScheduledSequence) -> bool:
        """Whether the sequence's adapter still matches its lease, in row and generation."""
        request, lease = sequence.request, sequence.lease
        adapter = request.adapter
        if lease is None:
            return adapter is None or sequence.end <= request.adapter_start
        published = self._arena.published.get(lease.row)
        return adapter == lease.key and published == (lease.key, lease.generation)

    def prepare_blocks(self, batch: ScheduledBatch) -> None:
        """Execute the batch's operations on blocks; once, before its first run."""
        self._cache.execute(batch.operations)

    def execute_at_rest(self, operations: Sequence[KvOperation]) -> None:
        """See `KvCache.execute_at_rest`."""
        self._cache.execute_at_rest(operations)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """See `KvCache.read_blocks`."""
        return self._cache.read_blocks(group, block_ids)

    def are_pages(self, group: int, num_blocks: int, pages: Sequence[bytes]) -> bool:
        """See `KvCache.are_pages`."""
        return self._cache.are_pages(group, num_blocks, pages)

    def write_host(self, group: int, slots: Sequence[int | None], pages: Sequence[bytes]) -> None:
        """See `KvCache.write_host`."""
        self._cache.write_host(group, slots, pages)

    def keep(self, request: Request, path: Sequence[int]) -> None:
        """Move the keys and values of a tree's accepted tokens to the slots of their positions.

        `path`: their indices in the request's draft, which was computed but neither appended nor
        advanced over. A tree's tokens are stored after the last token in the order of their
        indices.
        """
        first = len(request.token_ids) - request.kv.num_evicted
        moves = [
            (first + index, first + place) for place, index in enumerate(path) if index != place
        ]
        if moves:
            sources, targets = zip(*moves, strict=True)
            self._cache.move(request.kv.tables, sources, targets)

    def clear(self, request: Request, start: int, end: int) -> None:
        """Zero the entries of positions `[start, end)` of the request: non-finite values would
        enter sums with a weight of zero."""
        kv = request.kv
        self._cache.clear(kv.tables, start - kv.num_evicted, end - kv.num_evicted)

    def run(
        self,
        sequences: tuple[ScheduledSequence, ...],
        sampled: Sampled | None = None,
    ) -> StepOutput:
        """Compute keys and values of the scheduled tokens; on CUDA, only start to.

        The last `num_logits_rows` rows of each sequence are kept, whether they are sampled or only
        checked: a sequence with a non-finite row has written entries that must not be reused.
        `sampled`: the tokens of the step in flight, from which some sequences go on.
        """
        requests, num_tokens, _, starts, _, leases = zip(*sequences, strict=True)
        if requests != self._step.requests:
            self._step = StepRequests.of(requests)
        pending = None if sampled is None else _pending(sequences, sampled)
        chunks: Sequence[SequenceChunk]
        if max(num_tokens) == 1:
            chunks = self._step.decodes(starts, are_known=pending is None)
        else:
            chunks = list(map(chunk_of, sequences))
        pools = self._step.pools
        observations: Mapping[Request, Observation] = {}
        if self._step.evicts:
            observations = observe(sequences)
        if self._graphs and not observations:
            output = self.replay(self._graphs, chunks, leases, pending)
            if output is not None:
                self.num_graph_steps += 1
                return output
            self.num_eager_decodes += all(sequence.is_decode for sequence in sequences)
        observed = tuple(observations.values())
        features = self.features
        if features is not None and not any(map(self.watches, requests)):
            features = None
        if pools or features is not None:
            with self._watched(features, pools=pools) as watched:
                output = self.run_chunks(chunks, leases, pending, observed)
            output = watched.added_to(output)
        else:
            output = self.run_chunks(chunks, leases, pending, observed, reads_all=False)
        for request, observation in observations.items():
            request.attention_mass = observation.after
        return output

    def replay(
        self,
        graphs: DecodeGraphs,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        pending: PendingTokens | None = None,
    ) -> StepOutput | None:
        """The output of chunks of few tokens, each with the adapter of its lease; None if no graph
        serves them. `pending`: the tokens that stand for others in the first chunks."""
        if not graphs.serves(chunks):
            return None
        needs = self._needs(leases)
        if needs is None:
            return None
        return self.run_graph(graphs, chunks, leases, needs, pending)

    def run_graph(
        self,
        graphs: DecodeGraphs,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        needs: LoraNeeds,
        pending: PendingTokens | None,
    ) -> StepOutput | None:
        """Like `replay`, of chunks that the graphs serve; `needs`: of the leases' adapters."""
        if leases != self._adapter_rows[0]:
            self._adapter_rows = leases, _rows(leases)
        output = graphs.run(chunks, self._adapter_rows[1], needs, pending)
        if output is None:
            return None
        are_finite = HostCopy(output.are_finite)
        return StepOutput(
            output.logits, are_finite, output.hidden_states, output.token_states, output.features
        )

    @contextmanager
    def _watched(self, features: LayerFeatures | None, *, pools: bool) -> Iterator[_Watched]:
        """Collects what one step computes of the whole model inside, beside its logits."""
        with ExitStack() as hooks:
            states = hooks.enter_context(last_hidden_states(self._base.model)) if pools else []
            outputs = hooks.enter_context(features.seen()) if features else {}
            yield _Watched(states, features, outputs)

    def _needs(self, leases: Sequence[Lease | None]) -> LoraNeeds | None:
        """See `StepAdaptersBuilder.needs`."""
        before, needs = self._needed
        if leases != before:
            needs = self._adapters.needs(list(map(_run, [1] * len(leases), leases)))
            self._needed = leases, needs
        return needs

    def run_drafting(
        self,
        part: DraftingPart,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
    ) -> StepOutput:
        """Like `run_chunks`, of this part of the model."""
        with part.only():
            return self.run_chunks(chunks, leases)

    def run_chunks(
        self,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        pending: PendingTokens | None = None,
        observations: Sequence[Observation] = (),
        *,
        reads_all: bool = True,
    ) -> StepOutput:
        """Like `run`, for any chunks, each with the adapter of its lease.

        Chunks of one token come first, then those that verify draft tokens. `pending`: the tokens
        that stand for others in the first chunks. `observations`: of the chunks' attention.
        `reads_all`: more than the logits of the kept rows is read of the last layer's result.
        """
        inputs = make_inputs(
            chunks,
            groups=self._cache.groups,
            block_size=self._cache.block_size,
            device=self._base.device,
            table_rows=self._table_rows,
        )
        if pending is not None:
            pending.fill(inputs.input_ids, to_device(pending.sources, self._base.device))
        adapters = StepAdapters()
        if any(lease is not None for lease in leases):
            adapters = self._step_adapters(chunks, leases)
        states = None
        if inputs.states is not None:
            states = PagedStates(self._cache.states, self._cache.new_states, inputs.states)
        kept = None
        if not reads_all and len(inputs.logits_rows) < len(inputs.input_ids):
            kept = inputs.logits_rows
        paged = PagedForward(
            self._cache,
            inputs.attention,
            adapters.lora,
            states=states,
            rotary_rows=inputs.rotary_rows,
            kept=kept,
        )
        shared = self._base.shared_heads
        forward = ObservingForward(paged, observations, shared) if observations else paged
        seen: list[Tensor] = []
        try:
            with ExitStack() as hooks:
                if self.keeps_hidden_states:
                    seen = hooks.enter_context(head_inputs(self._base.model))
                token_ids = inputs.input_ids
                if adapters.head or adapters.embedding or adapters.vocabulary:
                    ends = self._base.ends.changed_by(adapters, token_ids)
                    token_ids = hooks.enter_context(ends)
                logits = run_model(
                    self._base.model,
                    forward,
                    token_ids,
                    inputs.positions,
                    inputs.logits_rows,
                )
        except BaseException:
            self._base.forget_step()
            raise
        for observation in observations:
            observation.settle(self._cache)
        are_finite = HostCopy(finite_rows(logits))
        if adapters.vocabulary is not None:
            adapters.vocabulary.hide(logits)
        return StepOutput(logits, are_finite, seen[0][0] if seen else None)

    def _step_adapters(
        self, chunks: Sequence[SequenceChunk], leases: Sequence[Lease | None]
    ) -> StepAdapters:
        if isinstance(chunks, DecodeChunks):
            ones = [1] * len(leases)
            wanted = _AdapterRows(ones, ones, [0] * len(leases), leases)
        else:
            wanted = _AdapterRows(
                [len(chunk.token_ids) for chunk in chunks],
                [chunk.num_logits_rows for chunk in chunks],
                [chunk.num_base_tokens for chunk in chunks],
                leases,
            )
        if self._built is None or self._built[0] != wanted:
            runs = adapter_runs(chunks, list(map(_run, wanted.counts, leases)))
            adapters = self._adapters.build(*runs, num_decodes=wanted.counts.count(1))
            self._built = wanted, adapters
        return self._built[1]


class StepRequests(NamedTuple):
    """The requests of a step by column, with what stays the same as long as they run: the next step
    mostly has the same ones."""

    requests: tuple[Request, ...]
    token_ids: list[list[int]]
    blocks: list[SequenceBlocks]
    tables: list[list[BlockTable]]
    num_evicted: Integers | None
    """None: one of them may evict tokens."""
    rotary_starts: Integers
    pools: bool
    """Whether one of them asks for an embedding."""
    evicts: bool
    """Whether the cache of one of them is compacted."""

    @classmethod
    def of(cls, requests: tuple[Request, ...]) -> StepRequests:
        blocks = [request.kv for request in requests]
        may_evict = any(each.may_evict for each in blocks)
        return cls(
            requests,
            [request.token_ids for request in requests],
            blocks,
            [each.tables for each in blocks],
            None if may_evict else np.zeros(len(blocks), np.int64),
            integers([request.namespace.rotary_start for request in requests]),
            pools=any(request.submitted.pooling for request in requests),
            evicts=any(each.eviction for each in blocks),
        )

    def decodes(self, starts: Sequence[int], *, are_known: bool) -> DecodeChunks:
        """A chunk of each request, of its token at this position. `are_known`: none is pending."""
        if are_known:
            tokens = list(map(list.__getitem__, self.token_ids, starts))
        else:  # a pending token is put in its place on the device
            tokens = [
                known[start] if start < len(known) else 0
                for known, start in zip(self.token_ids, starts, strict=True)
            ]
        num_evicted = self.num_evicted
        if num_evicted is None:
            num_evicted = integers([each.num_evicted for each in self.blocks])
        count = len(starts)
        return DecodeChunks(
            np.fromiter(tokens, np.int64, count),
            np.fromiter(starts, np.int64, count),
            self.tables,
            num_evicted,
            self.rotary_starts,
        )


class _Watched(NamedTuple):
    """What hooks collect in a step."""

    states: Sequence[Tensor]
    features: LayerFeatures | None
    outputs: dict[int, Tensor]

    def added_to(self, output: StepOutput) -> StepOutput:
        with torch.inference_mode():
            return output._replace(
                token_states=self.states[0] if self.states else None,
                features=self.features.combined(self.outputs) if self.features else None,
            )


class _AdapterRows(NamedTuple):
    """What a step's adapters are built from."""

    counts: Sequence[int]
    """For each sequence its tokens."""
    num_kept: Sequence[int]
    """For each sequence the rows whose logits are kept."""
    num_base_tokens: Sequence[int]
    """See `SequenceChunk`."""
    leases: Sequence[Lease | None]


def _pending(sequences: Sequence[ScheduledSequence], sampled: Sampled) -> PendingTokens | None:
    """The tokens that the step in flight samples for the sequences that decode, which come first;
    None: the host knows all."""
    places = sampled.places
    decodes = takewhile(lambda sequence: sequence.num_tokens == 1, sequences)
    sources = [
        -1 if sequence.start < len(sequence.request.token_ids) else places[sequence.request]
        for sequence in decodes
    ]
    if max(sources, default=-1) < 0:
        return None
    return SampledTokens(sampled.draws.tokens, sources)


def chunk_of(sequence: ScheduledSequence) -> SequenceChunk:
    """What a step computes of a sequence."""
    request, num_tokens, num_draft_tokens, start, _, _ = sequence
    tables, num_evicted = request.kv.tables, request.kv.num_evicted
    rotary_start = request.namespace.rotary_start
    if num_tokens == 1:
        known = request.token_ids
        token = known[start] if start < len(known) else 0
        return SequenceChunk(
            [token], start, tables, num_evicted=num_evicted, rotary_start=rotary_start
        )
    token_ids = request.token_ids[start : start + num_tokens - num_draft_tokens]
    draft = request.draft
    return SequenceChunk(
        [*token_ids, *draft.token_ids] if num_draft_tokens else token_ids,
        start,
        tables,
        sequence.num_logits_rows,
        tree=draft.parents if num_draft_tokens else None,
        is_prompt=not num_draft_tokens,
        num_evicted=num_evicted,
        rotary_start=rotary_start,
        num_base_tokens=max(request.adapter_start - start, 0) if sequence.lease else 0,
    )


def _run(count: int, lease: Lease | None) -> AdapterRun:
    """So many rows of the lease's adapter."""
    return AdapterRun(count) if lease is None else AdapterRun(count, lease.row, lease.generation)


def _rows(leases: Sequence[Lease | None]) -> list[int]:
    """The table row of each lease's adapter."""
    return [BASE_ROW if lease is None else lease.row for lease in leases]
