"""Due deliveries are sent by one server each, signed, and in turn."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update
from standardwebhooks import Webhook

from loraplex.adapters.child import child_environment
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.webhooks import deliveries as deliveries_module
from loraplex.api.webhooks.deliveries import PER_ENDPOINT, PER_TENANT, Deliveries, choose
from loraplex.api.webhooks.egress_client import EgressClient
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.models import AuditEntry
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.webhooks import outbox
from loraplex.platform.webhooks.event_types import DeliveryState, EventType
from loraplex.platform.webhooks.models import WebhookDelivery, WebhookEndpoint
from loraplex.platform.webhooks.outbox import Due
from loraplex.platform.webhooks.target import TargetPolicy
from support.catalog import make_tenant
from support.webhooks import Receiver, answer, never_answer

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries_module, "LOOK_SECONDS", 0.05)


class Server:
    """One server's deliveries, without the rest of it."""

    def __init__(self, database: Database, policy: TargetPolicy, authority: Path, name: str):
        self.control_plane = ControlPlane(database, SECRET)
        environment = {**child_environment(), "SSL_CERT_FILE": str(authority / "authority.pem")}
        self.egress = EgressClient(policy, environment=environment)
        self.deliveries = Deliveries(
            control_plane=self.control_plane,
            server_id=name,
            egress=self.egress,
            metrics=Metrics(lambda: None),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        await self.deliveries.start()
        try:
            yield self
        finally:
            await self.deliveries.close()
            self.control_plane.close()

    async def webhook(self, tenant: Tenant, url: str) -> str:
        """The secret of a new webhook."""
        issued = await self.control_plane.write(
            tenant.id,
            lambda session: self.control_plane.webhooks.create(
                session, url=url, events=None, description=None, created_by="key:test"
            ),
        )
        return issued.text

    async def announce(self, tenant: Tenant, count: int = 1) -> None:
        for number in range(count):
            await self.control_plane.write(
                tenant.id,
                lambda session, number=number: outbox.announce(  # type: ignore[misc]
                    session, tenant.id, EventType.BUDGET_ALERT, {"number": number}
                ),
            )


@pytest.fixture
def acme(database: Database) -> Tenant:
    return make_tenant(database, "acme")


@pytest.fixture
def bolt(database: Database) -> Tenant:
    return make_tenant(database, "bolt")


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def rows(database: Database) -> list[WebhookDelivery]:
    with database.platform_transaction(read_only=True) as session:
        return list(session.scalars(select(WebhookDelivery)))


def states(database: Database) -> Counter[str]:
    return Counter(row.state for row in rows(database))


def make_due(database: Database) -> None:
    with database.platform_transaction() as session:
        session.execute(update(WebhookDelivery).values(due_at=utc_now()))


def test_an_event_arrives_signed(
    database: Database, policy: TargetPolicy, authority: Path, receiver: Receiver, acme: Tenant
) -> None:
    async def run() -> str:
        server = Server(database, policy, authority, "one")
        async with server.running():
            secret = await server.webhook(acme, receiver.url("/signed"))
            await server.announce(acme)
            await until(lambda: states(database)[DeliveryState.DELIVERED] == 1)
            return secret

    secret = asyncio.run(run())
    (request,) = [each for each in receiver.received if each.path == "/signed"]
    verified = Webhook(secret).verify(request.body, request.headers)
    assert verified["type"] == "budget.alert"
    assert verified["id"] == request.headers["webhook-id"]
    assert request.headers["content-type"] == "application/json"
    (row,) = rows(database)
    assert (row.num_attempts, row.last_status, row.last_failure) == (1, 204, None)


@pytest.mark.slow
def test_a_failed_delivery_is_repeated_as_the_same_event(
    database: Database, policy: TargetPolicy, authority: Path, receiver: Receiver, acme: Tenant
) -> None:
    path = "/repeated"
    receiver.respond[path] = answer(b"HTTP/1.1 503 Busy\r\nretry-after: 3600")

    async def run() -> None:
        server = Server(database, policy, authority, "one")
        async with server.running():
            await server.webhook(acme, receiver.url(path))
            await server.announce(acme)
            await until(lambda: any(row.last_failure for row in rows(database)))
            (row,) = rows(database)
            assert (row.last_failure, row.last_status) == ("status", 503)
            assert row.due_at > utc_now() + timedelta(minutes=55), "the receiver wants an hour"
            del receiver.respond[path]
            make_due(database)
            await until(lambda: states(database)[DeliveryState.DELIVERED] == 1)

    asyncio.run(run())
    first, second = [each for each in receiver.received if each.path == path]
    assert first.body == second.body
    assert first.headers["webhook-id"] == second.headers["webhook-id"]


@pytest.mark.slow
def test_a_webhook_is_disabled_with_an_audit_entry(
    database: Database, policy: TargetPolicy, authority: Path, receiver: Receiver, acme: Tenant
) -> None:
    receiver.respond["/gone"] = answer(b"HTTP/1.1 410 Gone")

    async def run() -> None:
        server = Server(database, policy, authority, "one")
        async with server.running():
            await server.webhook(acme, receiver.url("/gone"))
            await server.announce(acme)
            await until(lambda: states(database)[DeliveryState.FAILED] == 1)

    asyncio.run(run())
    with database.transaction(acme.id, read_only=True) as session:
        (entry,) = session.scalars(select(AuditEntry))
        endpoint = session.scalars(select(WebhookEndpoint)).one()
    assert (entry.action, entry.resource) == ("webhook.disable", endpoint.id)
    assert entry.details == {"by": "receiver", "failure": "gone"}
    assert (endpoint.disabled_by, entry.actor_kind) == ("receiver", "system")


def test_a_target_that_does_not_answer_delays_no_other_tenant(
    database: Database,
    policy: TargetPolicy,
    authority: Path,
    receiver: Receiver,
    acme: Tenant,
    bolt: Tenant,
) -> None:
    receiver.respond["/silent"] = never_answer

    async def run() -> float:
        server = Server(database, policy, authority, "one")
        async with server.running():
            await server.webhook(acme, receiver.url("/silent"))
            await server.webhook(acme, receiver.url("/silent"))
            await server.webhook(bolt, receiver.url("/fast"))
            await server.announce(acme, 20)
            await until(lambda: len(_at(receiver, "/silent")) == PER_TENANT)
            began_at = time.monotonic()
            await server.announce(bolt, 5)
            await until(lambda: len(receiver.events_at("/fast")) == 5)
            seconds = time.monotonic() - began_at
            assert len(_at(receiver, "/silent")) == PER_TENANT
            receiver.respond["/silent"] = answer(b"HTTP/1.1 204 No Content")
            await server.egress.close()  # the silent ones would take five seconds
            return seconds

    assert asyncio.run(run()) < 4


def _at(receiver: Receiver, path: str) -> list[str]:
    return [each.path for each in receiver.received if each.path == path]


@pytest.mark.slow
def test_events_survive_the_death_of_the_egress_process(
    database: Database, policy: TargetPolicy, authority: Path, receiver: Receiver, acme: Tenant
) -> None:
    async def run() -> None:
        server = Server(database, policy, authority, "one")
        async with server.running():
            await server.webhook(acme, receiver.url("/egress-killed"))
            await server.announce(acme, 30)
            for number in (5, 15):
                await until(lambda: len(receiver.events_at("/egress-killed")) >= number)  # noqa: B023
                if (pid := server.egress.pid) is not None:
                    os.kill(pid, signal.SIGKILL)
            while len(receiver.events_at("/egress-killed")) < 30:
                await asyncio.sleep(0.2)
                with database.platform_transaction() as session:  # do not wait for the pauses
                    session.execute(
                        update(WebhookDelivery)
                        .where(WebhookDelivery.server_id.is_(None))
                        .values(due_at=utc_now())
                    )

    asyncio.run(asyncio.wait_for(run(), 60))
    numbers = {event["data"]["number"] for event in receiver.events_at("/egress-killed")}
    assert numbers == set(range(30))


@pytest.mark.slow
def test_several_servers_share_the_deliveries(
    database: Database, policy: TargetPolicy, authority: Path, receiver: Receiver, acme: Tenant
) -> None:
    async def run() -> None:
        one = Server(database, policy, authority, "one")
        other = Server(database, policy, authority, "other")
        async with one.running(), other.running():
            await one.webhook(acme, receiver.url("/shared"))
            await one.announce(acme, 20)
            await until(lambda: states(database)[DeliveryState.DELIVERED] == 20)

    asyncio.run(run())
    received = [each.event["id"] for each in receiver.received if each.path == "/shared"]
    assert len(received) == len(set(received)) == 20


def test_the_tenants_with_the_fewest_deliveries_come_first() -> None:
    due = [Due(f"a{n}", f"a-endpoint-{n % 3}", "acme") for n in range(20)]
    due += [Due("b", "b-endpoint", "bolt"), Due("c", "c-endpoint", "corp")]
    assert {each.tenant_id for each in choose(due, [], 3)} == {"acme", "bolt", "corp"}
    chosen = choose(due, [], 64)
    assert Counter(each.tenant_id for each in chosen) == {"acme": PER_TENANT, "bolt": 1, "corp": 1}
    assert max(Counter(each.endpoint_id for each in chosen).values()) <= PER_ENDPOINT
    assert choose([each for each in due if each not in chosen], chosen, 64) == []
    assert choose(due, [], 0) == []
    one_endpoint = [Due(str(n), "one", "acme") for n in range(9)]
    assert len(choose(one_endpoint, [], 64)) == PER_ENDPOINT
    spared = choose([*one_endpoint, Due("x", "two", "acme")], one_endpoint[:1], 1)
    assert [each.endpoint_id for each in spared] == ["two"]
