"""The engine's heart: one loop of schedule, run, process. Single-threaded.

Everything that can go wrong with one request ends that request and no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from .errors import InvalidParameter
from .heartbeat import Heartbeat
from .messages import (
    Abort,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterRead,
    AdapterStored,
    AdapterWanted,
    DeleteAdapter,
    EngineStats,
    ExplainAdapter,
    ForgetOutputs,
    FromEngine,
    ListRequests,
    MapMemory,
    Prefetch,
    PrefixPiece,
    SetPinned,
    Submit,
    ToEngine,
)
from .parts import EngineParts
from .reports.answers import Answers
from .reports.info import describe_engine
from .reports.statistics import Statistics
from .request_lifecycle import RequestLifecycle
from .step_executor import StepExecutor


class EngineCore:
    """One base model and everything that runs on it.

    `handle` takes messages, `step` does one iteration and returns messages. The caller owns the
    thread and the transport. Raises InvalidParameter on construction if the default KV policy is
    not supported.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.info = describe_engine(
            parts.config, parts.base, parts.plan, serves_grammars=parts.grammars.is_served
        )
        if parts.config.kv_policy and self.info.kv_policy_obstacle:
            raise InvalidParameter("kv_policy", self.info.kv_policy_obstacle)
        self._manager = parts.tiers.manager
        self._pace = parts.tiers.pace
        self._scheduler = parts.scheduler
        self._messages: list[FromEngine] = []
        """The answers that the next step returns."""
        self._statistics = Statistics(parts)
        self._requests = RequestLifecycle(parts, self.info, self._statistics)
        self._executor = StepExecutor(parts, self._requests, self._statistics)
        self._answers = Answers(parts)

    @property
    def has_work(self) -> bool:
        """False: nothing will happen before the next message."""
        pending = self._scheduler.has_requests or self._manager.has_pending_work
        pending = pending or self._is_disk_busy
        return pending or self._has_messages or self._executor.has_step_in_flight

    @property
    def awaits_message(self) -> bool:
        """After a step: only a message, such as a fetched adapter, can make the next one useful."""
        is_running = self._scheduler.num_running or self._executor.has_step_in_flight
        is_busy = is_running or self._manager.has_pending_work or self._is_disk_busy
        return not (self._has_messages or is_busy or self.parts.grammars.pending)

    def report_progress_to(self, heartbeat: Heartbeat) -> None:
        """Name each step's requests before it runs, and beat between its layers."""
        self._executor.report_progress_to(heartbeat)
        for model in self.parts.models:
            model.call_between_layers(heartbeat.beat)
        if self.parts.group:
            self.parts.group.watch.report_progress_to(heartbeat)

    def handle(self, message: ToEngine) -> None:
        """Take one message; never raises for what a message says."""
        match message:
            case Submit(submitted):
                self._requests.submit(submitted)
            case Abort(request_id):
                self._requests.abort(request_id)
            case DeleteAdapter(key, drain_seconds):
                self._requests.delete_adapter(key, drain_seconds)
            case AdapterFetched(key, paths, tier):
                self._manager.fetched(key, paths, tier)
            case AdapterFetchFailed(key, error):
                self._manager.fetch_failed(key, error.code, error.message)
            case AdapterStored(key):
                self._manager.forgive(key)
            case SetPinned(keys):
                self._manager.set_pinned(keys)
            case Prefetch(key, stay_seconds):
                self._manager.prefetch(key, stay_seconds)
            case ForgetOutputs(key):
                self.parts.speculation.forget_outputs(key)
            case ExplainAdapter(key):
                self._messages.append(self._answers.explain(key))
            case PrefixPiece():
                self._requests.take_prefix(message)
            case ListRequests():
                self._messages.append(self._answers.list_requests(message))
            case MapMemory(number):
                self._messages.append(self._answers.map_memory(number))
            case _:
                assert_never(message)

    def step(self) -> list[FromEngine]:
        """One iteration: take up what is ready, schedule, run, process.

        Raises RankLost if another rank of a group is gone.
        """
        if self.parts.group:
            self.parts.group.followers.check()
        self._manager.poll()
        if self.parts.kv.disk:
            self.parts.kv.disk.poll()
        if self.parts.border:
            self.parts.border.poll()
        if self.parts.host_border:
            self.parts.host_border.poll()
        self._messages += self._requests.poll()
        self._executor.read_if_needed()
        batch, started, failed = self._scheduler.schedule()
        if started:
            self._requests.start(started)
        for request, error in failed:
            self._requests.fail(request, error)
        self._pace.is_busy = batch is not None
        if batch:
            self._executor.run(batch)
            self._pace.is_busy = self._scheduler.num_running > 0
        else:
            self._executor.finish_first()
            self._executor.rest()
        return [*self._take_messages(), *self._statistics.poll()]

    @property
    def _is_disk_busy(self) -> bool:
        disk = self.parts.kv.disk
        return disk is not None and disk.is_busy

    @property
    def _has_messages(self) -> bool:
        requests = self._requests
        return bool(self._messages) or requests.has_events or bool(requests.handover.pieces)

    def _take_messages(self) -> Iterator[FromEngine]:
        """The messages for the fetcher, then the answers in order, then the requests' events, which
        say what a prefix has cost, then a piece of it."""
        fetches = self._manager.fetches
        if fetches.read or fetches.wanted:
            yield from map(AdapterRead, fetches.take_read())
            yield from map(AdapterWanted, fetches.take_wanted())
        yield from self._messages
        self._messages = []
        if self._requests.has_events:
            yield self._requests.take_events()
        if self._requests.handover.pieces:
            yield self._requests.handover.take_piece()

    def stats(self) -> EngineStats:
        """Where the engine stands now."""
        return self._statistics.snapshot()

    def close(self) -> None:
        """Stop the threads beside the loop."""
        self.parts.tiers.close()
        self._requests.handover.close()
        if self.parts.disk:
            self.parts.disk.close()
        self.parts.grammars.close()
        if self.parts.group:
            self.parts.group.followers.close()
