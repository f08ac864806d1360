"""The engine's answers to questions about its adapters, requests and memory."""

from __future__ import annotations

from dataclasses import replace

from ...adapters.identity import AdapterKey
from ..messages import AdapterExplanation, ListRequests, MemoryMap, RequestList
from ..parts import EngineParts
from .memory import map_memory
from .rank_stats import RankReports
from .requests import list_requests


class Answers:
    """Reads the engine's parts and changes none."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._ranks = RankReports(parts)

    def explain(self, key: AdapterKey) -> AdapterExplanation:
        parts = self._parts
        load = parts.tiers.manager.reports.explain(key)
        return AdapterExplanation(load, parts.speculation.explain(key))

    def list_requests(self, asked: ListRequests) -> RequestList:
        return list_requests(asked, self._parts.scheduler, self._parts.clock())

    def map_memory(self, number: int) -> MemoryMap:
        parts = self._parts
        mapped = map_memory(
            number,
            parts.tiers.manager,
            parts.scheduler,
            parts.kv,
            kv_block_bytes=parts.plan.kv_block_bytes,
        )
        return replace(mapped, ranks=self._ranks.read())
