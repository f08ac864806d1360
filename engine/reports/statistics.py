"""The engine's statistics: counters since its start and current gauges."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable

from ...adapters.status import AdapterChanges
from ..messages import EngineStats, RequestStarted
from ..parts import EngineParts
from ..request import Request
from ..scheduling.tenant_labels import TenantLabels
from .rank_stats import RankReports

INTERVAL_SECONDS = 0.5


class Statistics:
    """Counts requests, tokens and steps, and adds the gauges of the engine's parts."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._ranks = RankReports(parts)
        self._num_steps = 0
        self._num_step_sequences = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0
        self._labels = TenantLabels()
        self._service: Counter[str] = Counter()
        """Tokens computed, by the tenant's label."""
        self._next_time = 0.0

    def start(self, request: Request, event: RequestStarted) -> None:
        """Count a request that was scheduled for the first time."""
        num_computed = request.num_prompt_tokens - event.num_cached_tokens
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_cached_tokens += event.num_cached_tokens
        self._service[self._labels[request.tenant_id]] += num_computed

    def generate(self, request: Request, num_tokens: int) -> None:
        """Count new tokens of a request."""
        self._num_generated_tokens += num_tokens
        self._service[self._labels[request.tenant_id]] += num_tokens

    def step(self, num_sequences: int) -> None:
        """Count a step."""
        self._num_steps += 1
        self._num_step_sequences += num_sequences

    def poll(self) -> list[EngineStats]:
        """Return a snapshot, with the adapters that changed since the last one, if it is due."""
        now = self._parts.clock()
        if now < self._next_time:
            return []
        self._next_time = now + INTERVAL_SECONDS
        return [self._snapshot(self._parts.tiers.manager.reports.take_changes())]

    def snapshot(self) -> EngineStats:
        """A snapshot with all adapters."""
        statuses = self._parts.tiers.manager.reports.snapshot()
        return self._snapshot(AdapterChanges(statuses, gone=[]))

    def _snapshot(self, adapters: AdapterChanges) -> EngineStats:
        parts = self._parts
        scheduler, manager = parts.scheduler, parts.tiers.manager
        has_prefix_cache, groups = parts.config.prefix_caching, parts.kv.groups
        return EngineStats(
            num_steps=self._num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_kv_blocks=sum(map(parts.kv.num_free, self._kv_groups)),
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_adapter_loads=manager.num_loads,
            num_adapter_evictions=manager.num_evictions,
            adapters=adapters.statuses,
            gone_adapters=adapters.gone,
            kv_usage=max(map(self._kv_usage, self._kv_groups)),
            num_swaps=scheduler.num_swaps,
            num_swapped=scheduler.num_swapped,
            num_prefix_query_tokens=self._num_prompt_tokens if has_prefix_cache else 0,
            num_step_sequences=self._num_step_sequences,
            num_graph_steps=parts.runner.num_graph_steps,
            num_eager_decodes=parts.runner.num_eager_decodes,
            utilization=parts.utilization.snapshot(),
            tenant_service=list(self._service.items()),
            adapter_tiers=manager.reports.tier_stats(),
            speculation=parts.speculation.snapshot(),
            speculation_totals=parts.speculation.totals(),
            device_prefix_bytes=self._bytes_of(len(group.cached) for group in groups),
            num_device_prefix_evictions=sum(group.cached.num_evictions for group in groups),
            host_prefix_bytes=self._bytes_of(parts.kv.host_counts),
            host_prefix_capacity_bytes=self._bytes_of(group.host.num_slots for group in groups),
            num_host_prefix_evictions=sum(group.host.prefixes.num_evictions for group in groups),
            bytes_to_host=self._bytes_of(group.host.num_stored for group in groups),
            bytes_from_host=self._bytes_of(group.num_fetched for group in groups),
            num_blocks_to_host=sum(group.host.num_stored for group in groups),
            num_blocks_from_host=sum(group.num_fetched for group in groups),
            num_host_cached_tokens=parts.kv.num_fetched_tokens,
            arena_bytes=manager.arena_bytes,
            kv_cache_bytes=self._bytes_of(map(parts.kv.num_usable, self._kv_groups)),
            num_border_moves=parts.border.num_moves if parts.border else 0,
            host_cache_bytes=manager.host_bytes,
            num_host_border_moves=parts.host_border.num_moves if parts.host_border else 0,
            ranks=self._ranks.read(),
            **self._disk(),
        )

    def _disk(self) -> dict[str, int]:
        """The figures of the prefixes on disk."""
        disk = self._parts.kv.disk
        if disk is None:
            return {}
        return {
            "disk_prefix_bytes": disk.used_bytes,
            "disk_prefix_capacity_bytes": disk.capacity_bytes,
            "num_disk_prefix_evictions": sum(slots.prefixes.num_evictions for slots in disk.slots),
            "num_disk_cached_tokens": self._parts.scheduler.num_tokens_from_disk,
            "bytes_to_disk": disk.counts.written_bytes,
            "bytes_from_disk": disk.counts.read_bytes,
            "num_blocks_to_disk": disk.counts.num_written,
            "num_blocks_from_disk": disk.counts.num_read,
            "num_blocks_not_to_disk": disk.counts.num_dropped,
            "num_disk_misreads": disk.counts.num_failed,
            "num_disk_waits_given_up": self._parts.scheduler.num_disk_waits_given_up,
            "num_disks_off": int(disk.is_off),
        }

    def _bytes_of(self, num_blocks: Iterable[int]) -> int:
        """The bytes of so many blocks of each KV group."""
        return sum(map(operator.mul, self._parts.plan.kv_block_bytes, num_blocks))

    @property
    def _kv_groups(self) -> range:
        return range(len(self._parts.plan.kv_groups))

    def _kv_usage(self, group: int) -> float:
        kv = self._parts.kv
        return 1 - kv.num_free(group) / kv.num_usable(group)
