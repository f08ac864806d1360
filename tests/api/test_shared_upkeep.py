"""The upkeep of what every server leaves behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import func, select

from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.upkeep.shared_upkeep import SharedUpkeep
from loraplex.platform.accounts.failures import note_failure
from loraplex.platform.accounts.models import AccountSession, SignInFailures
from loraplex.platform.accounts.service import AccountService
from loraplex.platform.adapters.models import AdapterSampling
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.idempotency.models import IdempotentAnswer
from loraplex.platform.keyring import secret_id
from loraplex.platform.keys.principal import OperatorRole
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.models import Reservation
from loraplex.platform.samples.models import Sample
from loraplex.platform.samples.sample_seal import SampleSeal
from loraplex.platform.webhooks.event_types import EventType
from loraplex.platform.webhooks.models import WebhookDelivery, WebhookEndpoint
from loraplex.platform.webhooks.outbox import announce
from support.catalog import make_tenant, make_version
from support.identity import SettableClock
from support.limits import SERVER_ID, limit, make_demand
from support.samples import add, new_sample, opt_in

HOUR = timedelta(hours=1)


class NoGarbage:
    collect_shared: Callable[[], None] | None = None


def open_upkeep(
    control_plane: ControlPlane, *secrets: bytes, sample_days: int = 30
) -> SharedUpkeep:
    return SharedUpkeep(
        control_plane,
        NoGarbage(),  # type: ignore[arg-type]
        request_log_days=1,
        upload_days=1,
        sample_days=sample_days,
        seal=SampleSeal(secrets or [b"s" * 32]),
    )


def test_sessions_failures_and_answers_that_have_ended_are_forgotten_every_hour(
    database: Database,
) -> None:
    control_plane = ControlPlane(database, b"s" * 32)
    leave_behind(database, control_plane)
    upkeep = open_upkeep(control_plane)
    jobs = {job.name: job for job in upkeep.jobs()}
    due = [jobs["sign-ins"], jobs["idempotent-answers"]]
    assert [job.every for job in due] == [HOUR, HOUR]

    async def run() -> None:
        for job in due:
            await job.run()

    asyncio.run(run())
    control_plane.close()
    with database.platform_transaction(read_only=True) as session:
        for table in (AccountSession, SignInFailures, IdempotentAnswer):
            assert session.scalar(select(func.count()).select_from(table)) == 0, table


def leave_behind(database: Database, control_plane: ControlPlane) -> None:
    """A session, a failure and an answer of two days ago."""
    then = utc_now() - timedelta(days=2)
    accounts = AccountService(clock=SettableClock(then))
    with database.platform_transaction() as session:
        operator = control_plane.operators.create(session, "root", OperatorRole.ADMIN)
        token = accounts.invite_operator(session, operator).token
        holder = accounts.find_invited(session, token)
        accounts.enrol(session, token, "hash")
        accounts.open_enrolled(session, holder)
        note_failure(session, ["subject"], then)
        session.add(
            IdempotentAnswer(
                owner="key:one",
                key="k",
                request_hash=b"h" * 32,
                request_id="req-1",
                server_id="here",
                created_at=then,
            )
        )


def test_the_reservations_of_servers_that_never_came_back_are_dropped(database: Database) -> None:
    tenant = make_tenant(database, "acme")
    limit(database, tenant.id, concurrent_requests=1)
    with database.transaction(tenant.id) as session:
        quotas.reserve(session, make_demand(), server_id=SERVER_ID)
    with database.platform_transaction() as platform:
        row = platform.get_one(Reservation, "req-1")
        row.created_at -= timedelta(days=2)
        row.expires_at = 0.0
    control_plane = ControlPlane(database, b"s" * 32)
    upkeep = open_upkeep(control_plane)
    (job,) = (job for job in upkeep.jobs() if job.name == "reservations")

    async def run() -> None:
        await job.run()

    asyncio.run(run())
    control_plane.close()
    with database.platform_transaction(read_only=True) as platform:
        assert platform.scalars(select(Reservation)).all() == []


def test_old_events_go_and_secrets_of_webhooks_follow_the_servers(database: Database) -> None:
    tenant = make_tenant(database, "hooked")
    before = ControlPlane(database, b"a" * 32)
    with database.transaction(tenant.id) as session:
        issued = before.webhooks.create(
            session, url="https://a.example/", events=None, description=None, created_by="key:a"
        )
        announce(session, tenant.id, EventType.BUDGET_ALERT, {})
        session.scalars(select(WebhookDelivery)).one().created_at = utc_now() - timedelta(days=31)
    before.close()
    control_plane = ControlPlane(database, b"b" * 32, b"a" * 32)
    upkeep = open_upkeep(control_plane)
    (job,) = [job for job in upkeep.jobs() if job.name == "webhooks"]
    assert job.every == HOUR

    async def run() -> None:
        await job.run()

    asyncio.run(run())
    control_plane.close()
    with database.transaction(tenant.id, read_only=True) as session:
        assert session.scalars(select(WebhookDelivery)).all() == []
        secret = session.scalars(select(WebhookEndpoint)).one().secret_id
    assert secret == secret_id(b"b" * 32) != issued.endpoint.secret_id


def test_samples_expire_and_are_encrypted_anew_every_hour(database: Database) -> None:
    tenant, now = make_tenant(database, "acme"), utc_now()
    with database.transaction(tenant.id) as session:
        version = make_version(session)
        opt_in(session, days=2)
        session.scalars(select(AdapterSampling)).one().since = now - timedelta(days=9)
        moments = {"old": now - timedelta(days=3), "new": now - timedelta(days=1)}
        add(session, *(new_sample(version, text=text, at=at) for text, at in moments.items()))
    new_secret = b"n" * 32
    control_plane = ControlPlane(database, new_secret, b"s" * 32)
    upkeep = open_upkeep(control_plane, new_secret, b"s" * 32)
    (job,) = [job for job in upkeep.jobs() if job.name == "request-samples"]
    assert job.every == HOUR

    async def run() -> None:
        await job.run()

    asyncio.run(run())
    control_plane.close()
    with database.transaction(tenant.id, read_only=True) as session:
        (left,) = session.scalars(select(Sample)).all()
        content = SampleSeal([new_secret]).open(left)
    assert json.loads(content)["answer"]["content"] == "new"
