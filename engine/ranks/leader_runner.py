"""Runs a step on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.arena import Arena
from ...adapters.manager import Lease
from ..errors import RankLost
from ..execution.evictions import Observation
from ..execution.runner import ModelRunner, StepOutput
from ..model.base_model import BaseModel
from ..model.inputs import PendingTokens, SequenceChunk
from .commands import Chunk, LeasedRow, RunChunks, pack_tables
from .followers import Followers
from .leader_kv_cache import LeaderKvCache


class LeaderRunner(ModelRunner):
    """Rank 0's runner: it alone computes logits."""

    def __init__(
        self, followers: Followers, base: BaseModel, cache: LeaderKvCache, arena: Arena
    ) -> None:
        super().__init__(base, cache, arena)
        self._followers = followers

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
        assert not observations, "KV policies are refused"
        self._followers.tell(RunChunks(tuple(map(_command, chunks, leases))))
        try:
            return super().run_chunks(chunks, leases)
        except Exception as exc:
            raise RankLost("A step failed on one rank of the tensor-parallel group.") from exc


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
