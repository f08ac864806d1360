"""Response schemas for the processes of a group."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.messages import RankStats
from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class RankView(AnswerModel):
    """The memory of one rank."""

    rank: int
    stage: int
    """Of the pipeline. Stage 0 has the first layers."""
    host: str
    """Name of its machine."""
    resident_bytes: int
    """Of the process, mapped weights included."""
    weight_bytes: int
    kv_bytes: int
    """Size of the KV cache."""
    arena_bytes: int
    """Size of the arena."""
    arena_used_bytes: int
    host_bytes: int
    """Size of the adapters' host memory."""
    host_used_bytes: int
    age_seconds: float
    """Time since the rank reported this."""

    @classmethod
    def of(cls, stats: RankStats) -> RankView:
        """The view of what a rank has reported."""
        return cls(
            rank=stats.rank,
            stage=stats.stage,
            host=stats.host,
            resident_bytes=stats.resident_bytes,
            weight_bytes=stats.weight_bytes,
            kv_bytes=stats.kv_bytes,
            arena_bytes=stats.arena_bytes,
            arena_used_bytes=stats.arena_used_bytes,
            host_bytes=stats.host_bytes,
            host_used_bytes=stats.host_used_bytes,
            age_seconds=stats.age_seconds,
        )
