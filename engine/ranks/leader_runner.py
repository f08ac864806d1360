"""Runs a step on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from ...adapters.arena import Arena
from ...adapters.manager import Lease
from ...kernels.lora_batch import LoraNeeds
from ..errors import RankLost
from ..execution.decode_graphs import DecodeGraphs
from ..execution.evictions import Observation, observe
from ..execution.execution import Sampled
from ..execution.pooling import last_hidden_states
from ..execution.runner import ModelRunner, StepOutput, chunk_of
from ..model.base_model import BaseModel
from ..model.drafting_part import DraftingPart
from ..model.inputs import PendingTokens, SequenceChunk
from ..request import Request
from ..scheduling.batch import ScheduledSequence
from ..shards.rank_sums import RankSums
from .commands import (
    Chunk,
    ForgetRequests,
    LeasedRow,
    Replayed,
    RunChunks,
    pack_tables,
    unpack_tables,
)
from .followers import Followers
from .leader_kv_cache import LeaderKvCache
from .observed_attention import observed_command
from .step_tokens import SentTokens


class LeaderRunner(ModelRunner):
    """Rank 0's runner: it alone has the logits of all tokens."""

    def __init__(
        self,
        followers: Followers,
        ranks: RankSums,
        base: BaseModel,
        cache: LeaderKvCache,
        arena: Arena,
        graphs: DecodeGraphs | None,
    ) -> None:
        """`ranks`: the connections to the followers of this stage. `graphs`: those that every rank
        has. See `ModelRunner`."""
        super().__init__(base, cache, arena, graphs)
        self._followers = followers
        self._ranks = ranks
        self._leader_cache = cache
        self._has_stages = base.stages.place.num_stages > 1
        self._observed: set[Request] = set()
        """Those of whose attention the followers keep something."""

    def begin(self, sequences: tuple[ScheduledSequence, ...]) -> Callable[[], StepOutput]:
        """Let the other stages begin with a step; this one, which is the last, is what is left to
        compute: another step may begin before. Raises RankLost."""
        self._forget_ended()
        pools = any(sequence.request.submitted.pooling for sequence in sequences)
        chunks = list(map(chunk_of, sequences))
        leases = [sequence.lease for sequence in sequences]
        observations = observe(sequences)
        observed = tuple(observations.values())
        command = _command(chunks, leases, observed)
        self._followers.tell(command)
        operations = self._leader_cache.take_operations()
        # A request that ends meanwhile gives its blocks back.
        held = [
            chunk._replace(tables=unpack_tables(told.tables))
            for chunk, told in zip(chunks, command.chunks, strict=True)
        ]

        def compute() -> StepOutput:
            self._leader_cache.execute_here(operations)
            with last_hidden_states(self._base.model) as seen:
                output = self._compute(held, leases, observed)
            for request, observation in observations.items():
                request.attention_mass = observation.after
            self._note_observed(sequences)
            return output._replace(token_states=seen[0]) if pools else output

        return compute

    def run(
        self, sequences: tuple[ScheduledSequence, ...], sampled: Sampled | None = None
    ) -> StepOutput:
        """See `ModelRunner.run`. Raises RankLost."""
        if self._has_stages:
            assert sampled is None, "a request is in one step at a time"
            return self.begin(sequences)()
        self._forget_ended()
        output = super().run(sequences, sampled)
        self._note_observed(sequences)
        return output

    def graphs_within(
        self, name: str, context: Callable[[], AbstractContextManager[None]]
    ) -> DecodeGraphs | None:
        """None: followers capture steps of the whole model only."""
        return None

    def run_graph(
        self,
        graphs: DecodeGraphs,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        needs: LoraNeeds,
        pending: PendingTokens | None,
    ) -> StepOutput | None:
        """See `ModelRunner.run_graph`. Raises RankLost for any error."""
        sent = self._sent(pending)
        replayed = Replayed(*needs)
        self._followers.tell(
            _command(chunks, leases, num_pending=_num_pending(sent), replayed=replayed)
        )
        with self._rank_errors():
            output = super().run_graph(graphs, chunks, leases, needs, sent)
            assert output is not None, "graphs that ranks share serve the step or raise"
        return self._checked(output)

    def run_drafting(
        self,
        part: DraftingPart,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
    ) -> StepOutput:
        """See `ModelRunner.run_drafting`. Raises RankLost."""
        with part.only():
            self._followers.tell(_command(chunks, leases, drafting=part.name))
            return self._compute(chunks, leases)

    def run_chunks(
        self,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        pending: PendingTokens | None = None,
        observations: Sequence[Observation] = (),
        *,
        reads_all: bool = True,
    ) -> StepOutput:
        """See `ModelRunner.run_chunks`; every row is computed, whatever is read. Raises RankLost
        for any error: other ranks may wait in an exchange of this step, so no part of it can be
        run again."""
        sent = self._sent(pending)
        command = _command(chunks, leases, observations, num_pending=_num_pending(sent))
        self._followers.tell(command)
        return self._compute(chunks, leases, observations, sent)

    def _compute(
        self,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        observations: Sequence[Observation] = (),
        pending: SentTokens | None = None,
    ) -> StepOutput:
        with self._rank_errors():
            output = super().run_chunks(chunks, leases, pending, observations)
        return self._checked(output)

    def _sent(self, pending: PendingTokens | None) -> SentTokens | None:
        return None if pending is None else SentTokens(pending, self._ranks)

    @contextmanager
    def _rank_errors(self) -> Iterator[None]:
        """Inside, every error becomes RankLost."""
        try:
            yield
        except Exception as exc:
            self._followers.check()  # it names the rank, if one is known to be lost
            raise RankLost("A step failed on one rank of the group.") from exc

    def _checked(self, output: StepOutput) -> StepOutput:
        """The output of a step. Reading it raises RankLost if a rank was lost meanwhile: a device
        that waits for that rank is let go, and computes anything."""
        output.are_finite.check_with(self._followers.check)
        return output

    def _note_observed(self, sequences: Sequence[ScheduledSequence]) -> None:
        requests = (sequence.request for sequence in sequences)
        self._observed.update(request for request in requests if request.attention_mass)

    def _forget_ended(self) -> None:
        """Let the followers drop what they keep of requests that have ended."""
        ended = {request for request in self._observed if request.has_ended}
        if ended:
            self._observed -= ended
            self._followers.tell(ForgetRequests(tuple(each.request_id for each in ended)))


def _num_pending(sent: SentTokens | None) -> int:
    return 0 if sent is None else len(sent.sources)


def _command(
    chunks: Sequence[SequenceChunk],
    leases: Sequence[Lease | None],
    observations: Sequence[Observation] = (),
    *,
    drafting: str | None = None,
    num_pending: int = 0,
    replayed: Replayed | None = None,
) -> RunChunks:
    return RunChunks(
        tuple(map(_chunk_command, chunks, leases)),
        tuple(map(observed_command, observations)),
        drafting=drafting,
        num_pending=num_pending,
        replayed=replayed,
    )


def _chunk_command(chunk: SequenceChunk, lease: Lease | None) -> Chunk:
    leased = None
    if lease is not None:
        leased = LeasedRow(lease.row, lease.generation, lease.key)
    return Chunk(
        token_ids=tuple(chunk.token_ids),
        start=chunk.start,
        tables=pack_tables(chunk.tables),
        num_logits_rows=chunk.num_logits_rows,
        tree=None if chunk.tree is None else tuple(chunk.tree),
        is_prompt=chunk.is_prompt,
        num_evicted=chunk.num_evicted,
        rotary_start=chunk.rotary_start,
        num_base_tokens=chunk.num_base_tokens,
        leased=leased,
    )
