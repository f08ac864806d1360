"""Places, agents and the table of replicas come to agree: a real database, a cluster in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from loraplex.api.ray.agent_process import AgentReport
from loraplex.api.ray.autoscaling import UP_SECONDS, Autoscaler
from loraplex.api.ray.reconciler import Reconciler
from loraplex.platform.database import Database
from loraplex.platform.jobs.service import shared_now
from loraplex.platform.replicas import service as replicas
from loraplex.platform.replicas.models import Replica

MAX_DRAIN_SECONDS = 100.0


@dataclass
class Cluster:
    """Starts every agent at once, at a new port."""

    num_wanted: int = 0
    agents: dict[str, AgentReport | None] = field(default_factory=dict)
    """By place; None: nothing runs there."""
    stopped: list[str] = field(default_factory=list)
    next_port: int = 1000

    def places(self) -> Collection[str]:
        return set(self.agents)

    def add(self, replica_id: str) -> None:
        self.agents[replica_id] = None

    def start(self, replica_id: str) -> None:
        if self.agents[replica_id] is None:
            self.next_port += 1
            self.agents[replica_id] = AgentReport(address=f"node:{self.next_port}", num_starts=1)

    def reports(self) -> Mapping[str, AgentReport]:
        return {name: agent for name, agent in self.agents.items() if agent is not None}

    def stop(self, replica_id: str) -> None:
        self.stopped.append(replica_id)

    def end(self, replica_id: str) -> None:
        """The agent that was asked to end has ended."""
        assert replica_id in self.stopped
        self.agents[replica_id] = AgentReport(has_ended=True)

    def remove(self, replica_id: str) -> None:
        del self.agents[replica_id]


@dataclass
class World:
    """A reconciler and what surrounds it."""

    database: Database
    cluster: Cluster = field(default_factory=Cluster)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.reconciler = self.new_reconciler()

    def new_reconciler(self) -> Reconciler:
        return Reconciler(
            self.cluster,
            self.database,
            max_drain_seconds=MAX_DRAIN_SECONDS,
            clock=lambda: self.seconds,
        )

    def scale(self, number: int) -> None:
        self.reconciler.scale(number)
        self.reconciler.look()

    def rows(self) -> dict[str, Replica]:
        with self.database.platform_transaction(read_only=True) as session:
            found = replicas.list_replicas(session)
            session.expunge_all()
        return {row.id: row for row in found}

    def report(self, replica_id: str, *, num_open: int) -> None:
        """An API server has renewed the agent's lease."""
        with self.database.platform_transaction() as session:
            row = session.get_one(Replica, replica_id)
            row.figures, row.state = {"num_open": num_open}, "ready"
            row.seen_at = shared_now(session)

    def settle(self, replica_id: str) -> None:
        """It has been draining for long enough that every API server knows."""
        leaving = self.reconciler._leaving[replica_id]
        assert leaving.drained_from is not None
        leaving.drained_from -= timedelta(seconds=20)


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


def test_the_wanted_number_of_replicas_gets_places_agents_and_rows(world: World) -> None:
    world.scale(3)
    rows = world.rows()
    assert set(rows) == world.cluster.places()
    assert [row.address for row in rows.values()] == [
        agent.address for name in rows if (agent := world.cluster.agents[name])
    ]


def test_an_agent_that_starts_elsewhere_keeps_its_id(world: World) -> None:
    world.scale(2)
    before = world.rows()
    first = next(iter(before))
    world.cluster.agents[first] = None
    world.reconciler.look()
    after = world.rows()
    assert list(after) == list(before)
    assert after[first].address == "node:1003"


def test_a_replica_gets_the_former_address_of_another_once_that_has_moved(world: World) -> None:
    world.scale(2)
    before = world.rows()
    first, second = before
    world.cluster.agents[first] = AgentReport(address=before[second].address)
    world.cluster.agents[second] = AgentReport(address="node:2000")
    world.reconciler.look()
    world.reconciler.look()
    after = world.rows()
    assert after[first].address == before[second].address
    assert after[second].address == "node:2000"


def test_a_replica_that_never_served_leaves_before_those_that_do(world: World) -> None:
    world.scale(1)
    (serving,) = world.rows()
    world.cluster.add("0-first-by-name")
    world.cluster.agents["0-first-by-name"] = AgentReport(failure="exit code 1")
    world.reconciler.look()
    assert world.cluster.stopped == ["0-first-by-name"]
    assert list(world.rows()) == [serving]


def test_rows_of_other_agents_are_left_alone(world: World) -> None:
    with world.database.platform_transaction() as session:
        plain = replicas.add(session, "plain:7070").id
    world.scale(1)
    world.scale(0)
    assert plain in world.rows()


def test_a_leaving_replica_is_drained_then_ended_then_removed(world: World) -> None:
    world.scale(2)
    kept, leaving = world.rows()
    world.report(leaving, num_open=1)
    world.scale(1)
    assert [row.is_draining for row in world.rows().values()] == [False, True]
    world.settle(leaving)
    world.report(leaving, num_open=1)
    world.reconciler.look()
    assert world.cluster.stopped == []
    world.report(leaving, num_open=0)
    world.reconciler.look()
    assert world.cluster.stopped == [leaving]
    world.reconciler.look()
    assert set(world.rows()) == {kept, leaving}
    world.cluster.end(leaving)
    world.reconciler.look()
    assert set(world.rows()) == world.cluster.places() == {kept}


def test_figures_from_before_every_server_knew_of_the_drain_do_not_count(world: World) -> None:
    world.scale(1)
    (leaving,) = world.rows()
    world.report(leaving, num_open=0)
    world.scale(0)
    world.reconciler.look()
    assert world.cluster.stopped == []


def test_a_replica_that_does_not_finish_is_ended_after_the_limit(world: World) -> None:
    world.scale(1)
    (leaving,) = world.rows()
    world.report(leaving, num_open=1)
    world.scale(0)
    world.settle(leaving)
    world.seconds = MAX_DRAIN_SECONDS + 1
    world.report(leaving, num_open=1)
    world.reconciler.look()
    assert (world.rows(), world.cluster.places()) == ({}, set())


def test_a_replica_that_no_server_has_seen_leaves_at_once(world: World) -> None:
    world.scale(1)
    (leaving,) = world.rows()
    world.scale(0)
    assert world.cluster.stopped == [leaving]


def test_replicas_that_drain_leave_before_those_that_serve(world: World) -> None:
    world.scale(3)
    first, *others = world.rows()
    with world.database.platform_transaction() as session:
        replicas.set_draining(session, first, is_draining=True)
    world.scale(2)
    world.cluster.end(first)
    world.reconciler.look()
    assert list(world.rows()) == others


def test_a_leaving_replica_stays_so_when_more_are_wanted_again(world: World) -> None:
    world.scale(2)
    _, leaving = world.rows()
    world.report(leaving, num_open=1)
    world.scale(1)
    world.scale(2)
    assert len(world.rows()) == 3
    assert [each.id for each in world.reconciler.status() if each.is_leaving] == [leaving]


def test_a_new_controller_goes_on_where_the_old_one_ended(world: World) -> None:
    world.scale(3)
    before = world.rows()
    leaving = list(before)[-1]
    world.report(leaving, num_open=1)
    world.scale(2)
    world.reconciler = world.new_reconciler()
    world.reconciler.look()
    assert set(world.rows()) == set(before)
    assert [each.id for each in world.reconciler.status() if each.is_leaving] == [leaving]


def test_a_removed_row_of_a_replica_that_shall_be_there_comes_back(world: World) -> None:
    world.scale(1)
    (replica_id,) = world.rows()
    with world.database.platform_transaction() as session:
        replicas.remove(session, replica_id)
    world.reconciler.look()
    assert list(world.rows()) == [replica_id]


def test_what_an_agent_said_before_it_ended_is_shown(world: World) -> None:
    world.scale(1)
    (replica_id,) = world.rows()
    world.cluster.agents[replica_id] = AgentReport(num_starts=3, failure="exit code 1: no room")
    world.reconciler.look()
    (status,) = world.reconciler.status()
    assert (status.failure, status.num_starts) == ("exit code 1: no room", 3)


BUSY = {
    **{"num_open": 90, "num_running": 64, "num_waiting": 26, "max_batch": 64, "kv_usage": 0.5},
    **{"queue_p95_seconds": 0.0, "backlog_seconds": 0.0},
}
LOADING = {**BUSY, "num_running": 8, "num_waiting": 2, "backlog_seconds": 20.0}


def report_all(world: World, figures: Mapping[str, float]) -> None:
    with world.database.platform_transaction() as session:
        for row in replicas.list_replicas(session):
            row.figures = dict(figures)
            row.state, row.seen_at = "ready", shared_now(session)


@pytest.mark.parametrize("figures", [BUSY, LOADING], ids=["busy", "loading"])
def test_busy_replicas_get_more(world: World, figures: Mapping[str, float]) -> None:
    world.reconciler.autoscaler = Autoscaler(1, 3, clock=lambda: world.seconds)
    world.scale(1)
    while world.seconds <= UP_SECONDS + 1:
        report_all(world, figures)
        world.reconciler.look()
        world.seconds += 1.0
    world.reconciler.look()
    assert len(world.rows()) == 2


def test_a_fleet_that_goes_down_is_not_scaled_up(world: World) -> None:
    world.reconciler.autoscaler = Autoscaler(1, 3, clock=lambda: world.seconds)
    world.scale(1)
    world.scale(0)
    (leaving,) = world.rows()
    world.cluster.end(leaving)
    world.reconciler.look()
    assert (world.rows(), world.cluster.places()) == ({}, set())
