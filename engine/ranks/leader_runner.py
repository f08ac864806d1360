"""Runs a step on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.arena import Arena
from ...adapters.manager import Lease
from ..errors import RankLost
from ..execution.evictions import Observation
from ..execution.execution import Sampled
from ..execution.runner import ModelRunner, StepOutput
from ..model.base_model import BaseModel
from ..model.first_layers import FirstLayers
from ..model.inputs import PendingTokens, SequenceChunk
from ..request import Request
from ..scheduling.batch import ScheduledSequence
from .commands import Chunk, ForgetRequests, LeasedRow, RunChunks, pack_tables
from .followers import Followers
from .leader_kv_cache import LeaderKvCache
from .observed_attention import observed_command


class LeaderRunner(ModelRunner):
    """Rank 0's runner: it alone computes logits."""

    def __init__(
        self, followers: Followers, base: BaseModel, cache: LeaderKvCache, arena: Arena
    ) -> None:
        super().__init__(base, cache, arena)
        self._followers = followers
        self._observed: set[Request] = set()
        """Those of whose attention the followers keep something."""

    def run(
        self, sequences: tuple[ScheduledSequence, ...], sampled: Sampled | None = None
    ) -> StepOutput:
        """See `ModelRunner.run`. Raises RankLost."""
        self._forget_ended()
        output = super().run(sequences, sampled)
        requests = (sequence.request for sequence in sequences)
        self._observed.update(request for request in requests if request.attention_mass)
        return output

    def run_first_layers(
        self,
        layers: FirstLayers,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
    ) -> StepOutput:
        """See `ModelRunner.run_first_layers`. Raises RankLost."""
        with layers.only():
            return self._run(
                RunChunks(_commands(chunks, leases), is_early_exit=True), chunks, leases
            )

    def run_chunks(
        self,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        pending: PendingTokens | None = None,
        observations: Sequence[Observation] = (),
    ) -> StepOutput:
        """See `ModelRunner.run_chunks`. Raises RankLost for any error: other ranks may wait in an
        exchange of this step, so no part of it can be run again."""
        assert pending is None, "a step is read before the next one begins"
        observed = tuple(map(observed_command, observations))
        command = RunChunks(_commands(chunks, leases), observed)
        return self._run(command, chunks, leases, observations)

    def _run(
        self,
        command: RunChunks,
        chunks: Sequence[SequenceChunk],
        leases: Sequence[Lease | None],
        observations: Sequence[Observation] = (),
    ) -> StepOutput:
        self._followers.tell(command)
        try:
            return super().run_chunks(chunks, leases, observations=observations)
        except Exception as exc:
            self._followers.check()  # it names the rank, if one is known to be lost
            raise RankLost("A step failed on one rank of the tensor-parallel group.") from exc

    def _forget_ended(self) -> None:
        """Let the followers drop what they keep of requests that have ended."""
        ended = {request for request in self._observed if request.has_ended}
        if ended:
            self._observed -= ended
            self._followers.tell(ForgetRequests(tuple(each.request_id for each in ended)))


def _commands(chunks: Sequence[SequenceChunk], leases: Sequence[Lease | None]) -> tuple[Chunk, ...]:
    return tuple(map(_command, chunks, leases))


def _command(chunk: SequenceChunk, lease: Lease | None) -> Chunk:
    leased = None
    if lease is not None:
        leased = LeasedRow(lease.row, lease.generation, lease.key)
    return Chunk(
        token_ids=tuple(chunk.token_ids),
        start=chunk.start,
        tables=pack_tables(chunk.tables),
        tree=None if chunk.tree is None else tuple(chunk.tree),
        is_prompt=chunk.is_prompt,
        num_evicted=chunk.num_evicted,
        rotary_start=chunk.rotary_start,
        leased=leased,
    )
