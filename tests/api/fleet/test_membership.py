"""The table of replicas and a server's fleet agree: with a real database and real agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from sqlalchemy import select

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.fleet.membership import Membership
from loraplex.engine.fleet.fleet import Fleet
from loraplex.engine.messages import ReplicaState
from loraplex.platform.database import Database
from loraplex.platform.replicas import service as replicas
from loraplex.platform.replicas.models import Replica
from support.fake_client import collect, make_request, tokens_of, until
from support.small_fleet import HOST, RunningAgent, SmallFleet

LEASE_SECONDS = 300.0


@asynccontextmanager
async def joined(
    database: Database, folder: Path, *names: str
) -> AsyncIterator[tuple[dict[str, RunningAgent], Fleet, Membership]]:
    """Agents of these names, and a server that has found them in the database."""
    small, control_plane = SmallFleet(folder), ControlPlane(database, b"secret" * 8)
    fleet = small.make_fleet()
    membership = Membership(fleet, control_plane, lease_seconds=LEASE_SECONDS)
    async with asyncio.timeout(60):
        try:
            agents = {name: await small.add_agent(name) for name in names}
            await membership.add([f"{HOST}:{agent.port}" for agent in agents.values()])
            await membership.look()
            while not all(link.state is ReplicaState.READY for link in fleet.links):
                await asyncio.sleep(0.01)
                await membership.look()
            yield agents, fleet, membership
        finally:
            await fleet.stop()
            await small.close()
            control_plane.close()


def row_of(database: Database, agent: RunningAgent) -> Replica:
    with database.platform_transaction(read_only=True) as session:
        found = select(Replica).where(Replica.address == f"{HOST}:{agent.port}")
        return session.scalars(found).one()


def test_the_database_knows_an_agent_before_it_serves(database: Database, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with joined(database, tmp_path, "a") as (agents, fleet, _):
            row = row_of(database, agents["a"])
            assert row.seen_at is not None
            assert (row.base_id, row.runtime_id) == ("base", "base")
            assert row.incarnation == agents["a"].agent.incarnation
            assert tokens_of(await collect(fleet.submit(make_request("r", [3])))) == [3] * 4

    asyncio.run(scenario())


def test_a_removed_replica_is_left(database: Database, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with joined(database, tmp_path, "a", "b") as (agents, fleet, membership):
            row = row_of(database, agents["a"])
            with database.platform_transaction() as session:
                replicas.remove(session, row.id)
            await membership.look()
            assert [link.id for link in fleet.links] == [row_of(database, agents["b"]).id]
            assert tokens_of(await collect(fleet.submit(make_request("r", [3])))) == [3] * 4

    asyncio.run(scenario())


def test_a_drained_replica_accepts_nothing(database: Database, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with joined(database, tmp_path, "a", "b") as (agents, fleet, membership):
            with database.platform_transaction() as session:
                replicas.set_draining(session, row_of(database, agents["a"]).id, is_draining=True)
            await membership.look()
            streams = [fleet.submit(make_request(f"r{number}", [3])) for number in range(10)]
            open_at = {link.member.port: fleet.num_open_at(link.id) for link in fleet.links}
            assert open_at == {agents["a"].port: 0, agents["b"].port: 10}
            await asyncio.gather(*map(collect, streams))

    asyncio.run(scenario())


def test_an_expired_agent_does_not_get_its_lease_back(database: Database, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with joined(database, tmp_path, "a") as (agents, fleet, membership):
            with database.platform_transaction() as session:
                row = session.scalars(select(Replica)).one()
                assert row.seen_at is not None
                row.seen_at -= timedelta(seconds=LEASE_SECONDS)
            agents["a"].replica.ask_for_lease()
            await until(lambda: bool(fleet.asked_renewals()))
            await membership.look()
            await until(lambda: not fleet.is_ready)
            await agents["a"].stop()
            await agents["a"].start()
            while not fleet.is_ready:
                await membership.look()
                await asyncio.sleep(0.02)

    asyncio.run(scenario())
