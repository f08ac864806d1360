"""A simulated replica: its arena, its loader and its batch.

Steps without prompt tokens are alike until a request ends or another one begins, so such a run of
steps is one event.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import ceil

from loraplex.engine.fleet.replica_state import ReplicaState, ReplicaStats

from . import scenario as costs
from .workload import SimulatedRequest

At = Callable[[float, Callable[[], None]], None]
"""Calls a function at a time."""


class SimulatedReplica:
    """The owner calls `submit`; the replica schedules its own steps and loads with `at`."""

    def __init__(
        self,
        name: str,
        bytes_of: Mapping[str, float],
        at: At,
        on_end: Callable[[SimulatedRequest, SimulatedReplica], None],
    ) -> None:
        self.name = name
        self.state = ReplicaState.READY
        self.num_hits = self.num_misses = 0
        self.num_bytes_loaded = 0.0
        self._bytes_of, self._at, self._on_end = bytes_of, at, on_end
        self._life = 0  # events of an earlier life are void
        self._tickets = count()
        self._empty()

    def _empty(self) -> None:
        self._life += 1
        self._residents: OrderedDict[str, set[int]] = OrderedDict()  # with prefixes in the cache
        self._num_bytes = 0.0
        self._leases: Counter[str] = Counter()
        self._to_load: deque[str] = deque()
        self._loading: str | None = None
        self._awaiting: dict[str, list[SimulatedRequest]] = {}
        self._num_awaiting = 0
        self._admissible: deque[SimulatedRequest] = deque()
        self._prefills: deque[SimulatedRequest] = deque()
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []  # a heap by the last step
        self._in_batch: Counter[str | None] = Counter()
        self._step = 0
        self._run_id = 0
        self._run_start = self._run_step_seconds = 0.0
        self._run_steps = 0
        self._chunks: list[tuple[SimulatedRequest, int]] = []

    @property
    def num_waiting(self) -> int:
        """Requests without a first token."""
        return self._num_awaiting + len(self._admissible) + len(self._prefills)

    def stats(self) -> ReplicaStats:
        residents = frozenset([*self._residents, *self._awaiting])
        num_requests = self.num_waiting + len(self._decoding)
        return ReplicaStats(num_requests, costs.MAX_BATCH, residents)

    def waiting(self) -> list[SimulatedRequest]:
        awaiting = [each for requests in self._awaiting.values() for each in requests]
        return [*awaiting, *self._admissible, *self._prefills]

    def warm(self, adapters: Iterable[str]) -> None:
        """Fills the arena, the most popular adapter first."""
        for adapter in adapters:
            size = self._bytes_of[adapter]
            if adapter not in self._residents and self._num_bytes + size <= costs.ARENA_BYTES:
                self._residents[adapter] = set()
                self._residents.move_to_end(adapter, last=False)
                self._num_bytes += size

    def fail(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """Loses everything. Returns the requests before and after their first token."""
        unbegun, begun = self.waiting(), [each for *_, each in self._decoding]
        self._empty()
        return unbegun, begun

    def submit(self, request: SimulatedRequest, now: float) -> None:
        adapter = request.routed.adapter
        if adapter is None:
            self._admit(request, now)
            return
        if adapter in self._residents:
            self.num_hits += 1
            self._lease(adapter, request, now)
            return
        self.num_misses += 1
        self._num_awaiting += 1
        if adapter not in self._awaiting:
            self._awaiting[adapter] = []
            self._to_load.append(adapter)
        self._awaiting[adapter].append(request)
        self._load_next(now)

    def _lease(self, adapter: str, request: SimulatedRequest, now: float) -> None:
        self._residents.move_to_end(adapter)
        self._leases[adapter] += 1
        self._admit(request, now)

    def _load_next(self, now: float) -> None:
        if self._loading is not None or not self._to_load:
            return
        adapter = self._to_load[0]
        size = self._bytes_of[adapter]
        if not self._make_room(size):
            return  # a lease that ends tries again
        self._loading = self._to_load.popleft()
        self._num_bytes += size
        life = self._life
        seconds = size / costs.LOAD_BYTES_PER_SECOND
        self._at(now + seconds, lambda: self._loaded(adapter, life, now + seconds))

    def _make_room(self, size: float) -> bool:
        if self._num_bytes + size <= costs.ARENA_BYTES:
            return True
        for adapter in [each for each in self._residents if not self._leases[each]]:
            del self._residents[adapter]
            self._num_bytes -= self._bytes_of[adapter]
            if self._num_bytes + size <= costs.ARENA_BYTES:
                return True
        return False

    def _loaded(self, adapter: str, life: int, now: float) -> None:
        if life != self._life:
            return
        self.num_bytes_loaded += self._bytes_of[adapter]
        self._loading = None
        self._residents[adapter] = set()
        requests = self._awaiting.pop(adapter)
        self._num_awaiting -= len(requests)
        for request in requests:
            self._lease(adapter, request, now)
        self._load_next(now)

    def _admit(self, request: SimulatedRequest, now: float) -> None:
        self._admissible.append(request)
        if not self._run_steps:
            self._begin_run(now)
        elif self._run_steps > 1 and len(self._decoding) < costs.MAX_BATCH:
            self._end_run_early(now)

    def _end_run_early(self, now: float) -> None:
        steps = max(1, ceil((now - self._run_start) / self._run_step_seconds))
        if steps < self._run_steps:
            self._schedule_run(steps)

    def _schedule_run(self, num_steps: int) -> None:
        self._run_steps = num_steps
        self._run_id += 1
        life, run_id = self._life, self._run_id
        end = self._run_start + num_steps * self._run_step_seconds
        self._at(end, lambda: self._end_run(life, run_id, end))

    def _begin_run(self, now: float) -> None:
        while self._admissible and len(self._decoding) + len(self._prefills) < costs.MAX_BATCH:
            self._start(self._admissible.popleft())
        num_rows = len(self._decoding)
        self._chunks = self._take_chunks(costs.TOKEN_BUDGET - num_rows)
        if not num_rows and not self._chunks:
            return
        self._run_start = now
        self._run_step_seconds = (
            costs.STEP_SECONDS
            + costs.ROW_SECONDS * num_rows
            + costs.ADAPTER_SECONDS * len(self._in_batch)
            + costs.PROMPT_TOKEN_SECONDS * sum(size for _, size in self._chunks)
        )
        self._schedule_run(1 if self._chunks else self._decoding[0][0] - self._step)

    def _start(self, request: SimulatedRequest) -> None:
        adapter = request.routed.adapter
        self._in_batch[adapter] += 1
        known = adapter is not None and request.prefix in self._residents[adapter]
        request.num_prompt_left = request.num_prompt_tokens - known * costs.PREFIX_TOKENS
        self._prefills.append(request)

    def _take_chunks(self, budget: int) -> list[tuple[SimulatedRequest, int]]:
        chunks = []
        for request in self._prefills:
            if not budget:
                break
            size = min(budget, request.num_prompt_left)
            budget -= size
            chunks.append((request, size))
        return chunks

    def _end_run(self, life: int, run_id: int, now: float) -> None:
        if life != self._life or run_id != self._run_id:
            return
        self._step += self._run_steps
        self._run_steps = 0
        while self._decoding and self._decoding[0][0] <= self._step:
            self._finish(heappop(self._decoding)[2])
        for request, size in self._chunks:
            request.num_prompt_left -= size
            if not request.num_prompt_left:
                self._prefills.popleft()
                self._first_token(request, now)
        self._begin_run(now)
        self._load_next(now)

    def _first_token(self, request: SimulatedRequest, now: float) -> None:
        request.first_token_at = now
        adapter = request.routed.adapter
        if adapter is not None:
            self._residents[adapter].add(request.prefix)
        if request.num_output_tokens == 1:
            self._finish(request)
            return
        last_step = self._step + request.num_output_tokens - 1
        heappush(self._decoding, (last_step, next(self._tickets), request))

    def _finish(self, request: SimulatedRequest) -> None:
        adapter = request.routed.adapter
        self._in_batch[adapter] -= 1
        if not self._in_batch[adapter]:
            del self._in_batch[adapter]
        if adapter is not None:
            self._leases[adapter] -= 1
        self._on_end(request, self)
