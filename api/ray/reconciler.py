"""Keeps places on a cluster, agents and the table of replicas in agreement.

What there shall be is the wanted number and the places, which outlive this process. Rows without a
place are of agents that somebody else runs, and are left alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import structlog

from ...engine.messages import ReplicaState
from ...platform.base import JsonObject, new_id
from ...platform.database import Database
from ...platform.errors import InvalidValue
from ...platform.jobs.service import shared_now
from ...platform.replicas import service as replicas
from ...platform.replicas.models import Replica
from .agent_process import AgentReport
from .autoscaling import Autoscaler, ReplicaLoad
from .placement import Placement

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 5.0
"""API servers read the table every second, and report figures every 3 s."""
LIVE_SECONDS = 10.0
"""A replica that no API server has reported for this time is connected to none."""


class ReplicaStatus(NamedTuple):
    """A replica as `status` shows it."""

    id: str
    address: str | None
    """Of its row; None before it was ready for the first time."""
    is_leaving: bool
    num_starts: int
    """Of its agent, in the life of its actor."""
    failure: str | None


@dataclass(slots=True)
class _Leaving:
    """A replica that goes away."""

    since: float
    drained_from: datetime | None = None
    """By the database's clock."""
    is_stopped: bool = False


class _Row(NamedTuple):
    address: str
    is_draining: bool
    state: str | None
    figures: JsonObject | None
    seen_at: datetime | None


@dataclass(slots=True)
class Reconciler:
    """One round after the other brings what there is nearer to what there shall be."""

    placement: Placement
    database: Database
    max_drain_seconds: float
    """A replica that goes away is ended after this time, whatever is open there."""
    autoscaler: Autoscaler | None = None
    """None: the wanted number is only changed by `scale`."""
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _leaving: dict[str, _Leaving] = field(default_factory=dict)
    _reports: Mapping[str, AgentReport] = field(default_factory=dict)
    _rows: Mapping[str, _Row] = field(default_factory=dict)

    def scale(self, number: int) -> None:
        """There shall be this number of replicas."""
        with self._lock:
            self.placement.num_wanted = number

    def status(self) -> Sequence[ReplicaStatus]:
        """The replicas as of the last round."""
        with self._lock:
            return [self._status(replica_id) for replica_id in sorted(self._reports)]

    def look(self) -> None:
        """One round. Raises a PlatformError, and what the placement raises."""
        with self._lock:
            self._rows, now = self._read()
            places = sorted(self.placement.places())
            self._autoscale(places, now)
            staying, leaving = self._divide(places)
            for _ in range(self.placement.num_wanted - len(staying)):
                place = new_id()
                self.placement.add(place)
                staying.append(place)
            for place in staying:
                self.placement.start(place)
            reports = self.placement.reports()
            self._reports = {
                each: reports.get(each, AgentReport()) for each in (*staying, *leaving)
            }
            for place in staying:
                self._note_address(place, self._reports[place].address)
            for place in leaving:
                self._let_go(place, reports.get(place), now)

    def _autoscale(self, places: Sequence[str], now: datetime) -> None:
        if self.autoscaler is None or self.placement.num_wanted == 0:
            return
        serving = [
            row for name in places if (row := self._rows.get(name)) and _is_serving(row, now)
        ]
        loads = [ReplicaLoad.from_figures(row.figures) for row in serving if row.figures]
        wanted = self.autoscaler.wanted(self.placement.num_wanted, loads)
        if wanted != self.placement.num_wanted:
            self.placement.num_wanted = wanted

    def _divide(self, places: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those that stay and those that leave. Those that drain already leave first, then those
        that never served, then the last that were added."""
        ordered = [each for each in self._rows if each in places]  # in the order of their addition
        ordered += [each for each in places if each not in self._rows]
        by_merit = sorted(ordered, key=self._is_draining)
        number = self.placement.num_wanted
        staying = [each for each in by_merit if each not in self._leaving][:number]
        leaving = [each for each in ordered if each not in staying]
        for each in leaving:
            self._leaving.setdefault(each, _Leaving(self.clock()))
        return staying, leaving

    def _is_draining(self, replica_id: str) -> bool:
        row = self._rows.get(replica_id)
        return row is not None and row.is_draining

    # --- replicas that stay -----------------------------------------------------------------------

    def _note_address(self, replica_id: str, address: str | None) -> None:
        row = self._rows.get(replica_id)
        if address is None or (row is not None and row.address == address):
            return
        try:
            with self.database.platform_transaction() as session:
                if row is None:
                    replicas.add(session, address, replica_id=replica_id)
                else:
                    replicas.move(session, replica_id, address)
        except InvalidValue as exc:  # the port was another replica's, whose row has not moved yet
            log.warning("replica_not_moved", replica=replica_id, reason=str(exc))

    # --- replicas that leave ----------------------------------------------------------------------

    def _let_go(self, replica_id: str, report: AgentReport | None, now: datetime) -> None:
        """Drain, then end the agent, then remove the row and the place."""
        leaving, row = self._leaving[replica_id], self._rows.get(replica_id)
        is_overdue = self.clock() - leaving.since > self.max_drain_seconds
        if row is not None and leaving.drained_from is None:
            with self.database.platform_transaction() as session:
                replicas.set_draining(session, replica_id, is_draining=True)
            leaving.drained_from = now
        if not leaving.is_stopped and (is_overdue or _is_drained(row, leaving.drained_from, now)):
            self.placement.stop(replica_id)
            leaving.is_stopped = True
        if leaving.is_stopped and (is_overdue or report is None or report.has_ended):
            self._remove(replica_id)

    def _remove(self, replica_id: str) -> None:
        if replica_id in self._rows:
            with self.database.platform_transaction() as session:
                replicas.remove(session, replica_id)
        self.placement.remove(replica_id)
        del self._leaving[replica_id]

    # --- what is known ----------------------------------------------------------------------------

    def _read(self) -> tuple[dict[str, _Row], datetime]:
        with self.database.platform_transaction(read_only=True) as session:
            rows = {row.id: _as_row(row) for row in replicas.list_replicas(session)}
            return rows, shared_now(session)

    def _status(self, replica_id: str) -> ReplicaStatus:
        report, row = self._reports[replica_id], self._rows.get(replica_id)
        return ReplicaStatus(
            id=replica_id,
            address=row.address if row else report.address,
            is_leaving=replica_id in self._leaving,
            num_starts=report.num_starts,
            failure=report.failure,
        )


def _is_drained(row: _Row | None, drained_from: datetime | None, now: datetime) -> bool:
    """Whether nothing is open there any more. The agent waits for what nobody has reported."""
    if row is None or row.seen_at is None or drained_from is None:
        return True
    if (now - drained_from).total_seconds() < SETTLE_SECONDS:
        return False
    if (now - row.seen_at).total_seconds() > LIVE_SECONDS:
        return True
    is_current = (row.seen_at - drained_from).total_seconds() > SETTLE_SECONDS / 2
    return is_current and (row.figures or {}).get("num_open") == 0


def _is_serving(row: _Row, now: datetime) -> bool:
    is_seen = row.seen_at is not None and (now - row.seen_at).total_seconds() <= LIVE_SECONDS
    return is_seen and row.state == ReplicaState.READY and not row.is_draining


def _as_row(row: Replica) -> _Row:
    return _Row(
        address=row.address,
        is_draining=row.is_draining,
        state=row.state,
        figures=row.figures,
        seen_at=row.seen_at,
    )
