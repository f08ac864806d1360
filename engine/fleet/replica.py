"""An agent's engine, disk cache and lease, which all connected API servers share."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ...adapters.fetcher import BlockSource, FetchedBlock
from ...adapters.identity import AdapterKey
from ..config import EngineConfig
from ..errors import EngineUnavailable
from ..messages import (
    AdaptersProven,
    EngineCrashed,
    EngineReady,
    EngineStats,
    FromAgent,
    LeaseAsked,
    PrefixPiece,
    ReplicaChanged,
    ReplicaRole,
    ReplicaState,
    SetPinned,
)
from ..process.client import EngineClient
from ..process.engine_observer import EngineObserver
from ..process.engine_process import ENGINE_COMMAND
from ..process.proven_adapters import ProvenAdapters
from ..process.quarantine import QUARANTINE_SECONDS
from .block_questions import BlockQuestions
from .lease import Lease


class ApiServer(Protocol):
    """A connected API server."""

    @property
    def num_open(self) -> int:
        """The number of its open requests."""

    def send(self, message: FromAgent) -> bool:
        """False if it cannot be reached."""

    def take_prefix(self, piece: PrefixPiece) -> None:
        """A part of a prefix that some API server's request exports."""

    def close(self) -> None:
        """End its link and all that it has open."""


class Replica(EngineObserver):
    """Serves while its engine is ready and it holds the lease, until it drains."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        fetcher: BlockSource,
        command: Sequence[str] = ENGINE_COMMAND,
        lease: Lease | None = None,
        role: ReplicaRole = ReplicaRole.BOTH,
    ) -> None:
        self.fetcher = fetcher
        self.engine = EngineClient(
            config,
            on_adapter_wanted=self._fetch,
            on_adapter_read=fetcher.note_read,
            command=command,
            max_submissions=1,  # an API server sends what had not started to another replica
            observer=self,
        )
        self.lease = lease or Lease()
        self._role = role
        self.blocks = BlockQuestions(lambda: [each.send for each in self._servers])
        self._servers: list[ApiServer] = []
        self._is_draining = False
        self._pins_as_of = float("-inf")
        self._proven = ProvenAdapters(time.monotonic)
        self._crashes: deque[tuple[float, EngineCrashed]] = deque()
        """With their times, for as long as they make suspects."""
        self._num_crashes = 0
        self._told: ReplicaState | None = None
        """The state that the API servers know."""

    # --- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> ReplicaState:
        if not (self.engine.is_ready and self.lease.is_held):
            return ReplicaState.REFUSING
        return ReplicaState.DRAINING if self._is_draining else ReplicaState.READY

    @property
    def num_open(self) -> int:
        """The number of open requests of all API servers."""
        return sum(server.num_open for server in self._servers)

    def check_accepts(self) -> None:
        """Raises EngineUnavailable if a request must go to another replica."""
        if self.state is not ReplicaState.READY:
            raise EngineUnavailable

    def drain(self) -> None:
        """Accept no further requests."""
        self._is_draining = True
        self.note_state()

    def ask_for_lease(self) -> None:
        """Ask every API server to renew it: one answer is enough."""
        self._tell(LeaseAsked(self.lease.ask()))

    def renew_lease(self, number: int, seconds: float) -> None:
        """Take an API server's answer."""
        self.lease.renew(number, seconds)
        if self.state is not self._told:
            self.note_state()

    # --- API servers ------------------------------------------------------------------------------

    def welcome(self, server: ApiServer) -> None:
        """Tell an API server that has just connected what the others know."""
        self._servers.append(server)
        server.send(EngineReady(self.engine.info))
        if self.engine.stats is not None:
            server.send(self.engine.stats)
        for at, crash in self._crashes:
            server.send(replace(crash, seconds_ago=time.monotonic() - at))
        server.send(AdaptersProven(list(self._proven)))
        server.send(self._as_changed())
        server.send(LeaseAsked(self.lease.ask()))

    def note_end(self, server: ApiServer) -> None:
        """The API server is no longer connected."""
        self._servers.remove(server)
        self.blocks.ask_again()

    def close(self) -> None:
        """End the links to all API servers."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    def note_state(self) -> None:
        self._told = self.state
        self._tell(self._as_changed())
        self.ask_for_lease()  # so that the database learns the state too

    def _as_changed(self) -> ReplicaChanged:
        return ReplicaChanged(self.state, self.engine.num_restarts, self._role)

    def note_prefix(self, piece: PrefixPiece) -> None:
        for server in self._servers:
            server.take_prefix(piece)

    def note_stats(self, stats: EngineStats) -> None:
        self._tell(stats)

    def note_crash(self, crash: EngineCrashed) -> None:
        self._num_crashes += 1
        crash = replace(crash, number=self._num_crashes)
        now = time.monotonic()
        self._crashes.append((now, crash))
        while self._crashes[0][0] <= now - QUARANTINE_SECONDS:
            self._crashes.popleft()
        self._tell(crash)

    def note_proven(self, key: AdapterKey) -> None:
        self._proven.note_proven(key)
        self._tell(AdaptersProven([key]))

    def _tell(self, message: FromAgent) -> None:
        for server in self._servers:
            server.send(message)

    # --- adapters ---------------------------------------------------------------------------------

    def set_pinned(self, message: SetPinned) -> None:
        """Pin these adapters, unless the database was read for others after it was for these."""
        if message.as_of >= self._pins_as_of:
            self._pins_as_of = message.as_of
            self.engine.set_pinned(message.keys)

    async def _fetch(self, key: AdapterKey) -> FetchedBlock:
        found = await self.blocks.locate(key)
        return await asyncio.wrap_future(
            self.fetcher.fetch(key, sha256=found.sha256, size_bytes=found.size_bytes)
        )
