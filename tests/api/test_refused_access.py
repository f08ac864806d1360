"""Refused calls are in the audit log: once a minute, counted, in the correct chain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.api.control_plane import refusals as module
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.refusals import MAX_ENTRIES, OTHERS, Refusals
from loraplex.platform.audit import repository
from loraplex.platform.audit.event import UNKNOWN, Party
from loraplex.platform.audit.models import AuditEntry, PlatformAuditEntry
from loraplex.platform.audit.repository import AuditFilter
from loraplex.platform.database import Database
from loraplex.platform.errors import DatabaseUnavailable, TenantSuspended
from loraplex.platform.keys.principal import Actor, ActorKind, OperatorRole, Scope
from loraplex.platform.tenants import service as tenants
from support.browser import Browser
from support.secrets_scan import database_bytes
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, serving

Entry = AuditEntry | PlatformAuditEntry
WANTED = AuditFilter(action="access")


class Log:
    """What a database's chains hold of refusals."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, tenant_id: str) -> list[Entry]:
        with self._database.transaction(tenant_id, read_only=True) as session:
            return list(repository.list_entries(session, WANTED, after=None, limit=500))

    def of_platform(self) -> list[Entry]:
        with self._database.platform_transaction(read_only=True) as session:
            return list(repository.list_platform_entries(session, WANTED, after=None, limit=500))


def told(entries: list[Entry]) -> list[tuple[str, str, str, int]]:
    """Of each who was refused what, by which code and how often."""
    return sorted(
        (entry.actor_name, entry.resource, entry.details["code"], entry.details["times"])
        for entry in entries
    )


# --- what is written ------------------------------------------------------------------------------


@pytest.fixture
def tenant_id(database: Database) -> str:
    with database.platform_transaction() as session:
        return tenants.create_tenant(session, "acme").id


def party(tenant_id: str | None, name: str) -> Party:
    return Party(tenant_id, Actor(ActorKind.KEY, name, name))


def add(refusals: Refusals, whom: Party, resource: str = "GET /v1/keys") -> None:
    refusals.add(whom, code="refused", resource=resource, request_id="req-1", address="192.0.2.1")


def test_a_flood_is_one_entry_with_a_count(database: Database, tenant_id: str) -> None:
    plane = ControlPlane(database, b"secret")
    refusals = Refusals(plane)
    for _ in range(1000):
        add(refusals, party(tenant_id, "ann"))
    asyncio.run(refusals.write())
    asyncio.run(refusals.write())  # nothing is left
    (entry,) = Log(database).of(tenant_id)
    assert told([entry]) == [("ann", "GET /v1/keys", "refused", 1000)]
    assert (entry.address, entry.details["first_request"]) == ("192.0.2.1", "req-1")
    assert entry.request_id is None, "a request with an entry counts as carried out"
    with database.platform_transaction(read_only=True) as session:
        assert plane._audit_log.verify(session, tenant_id).breach is None


def test_one_chains_many_refusals_share_an_entry_and_take_none_from_others(
    database: Database, tenant_id: str
) -> None:
    refusals = Refusals(ControlPlane(database, b"secret"))
    for number in range(MAX_ENTRIES + 30):
        add(refusals, party(tenant_id, "ann"), f"GET /{number}")
    add(refusals, party(tenant_id, "ann"), "GET /0")  # one that has an entry already
    add(refusals, UNKNOWN)
    asyncio.run(refusals.write())
    entries = told(Log(database).of(tenant_id))
    assert len(entries) == MAX_ENTRIES + 1
    assert ("ann", "GET /0", "refused", 2) in entries
    assert ("system", OTHERS, OTHERS, 30) in entries
    assert told(Log(database).of_platform()) == [("unknown", "GET /v1/keys", "refused", 1)]


def test_what_cannot_be_written_waits_for_the_database(
    database: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = ControlPlane(database, b"secret")
    refusals = Refusals(plane)

    async def fail(*given: object) -> None:
        raise DatabaseUnavailable

    async def go() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(plane, "note", fail)
            for name in ("ann", "bob"):
                add(refusals, party(tenant_id, name))
                add(refusals, party(tenant_id, name))
            await refusals.write()
        add(refusals, party(tenant_id, "ann"))
        await refusals.write()

    asyncio.run(go())
    counts = [(name, times) for name, _, _, times in told(Log(database).of(tenant_id))]
    assert counts == [("ann", 3), ("bob", 2)]


def test_closing_while_entries_are_written_loses_none_of_the_others(
    database: Database, tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.0)
    plane = ControlPlane(database, b"secret")
    refusals = Refusals(plane)

    async def go() -> None:
        is_writing = asyncio.Event()

        async def hang(*given: object) -> None:
            is_writing.set()
            await asyncio.Event().wait()

        for name in ("ann", "bob", "eve"):
            add(refusals, party(tenant_id, name))
        with monkeypatch.context() as patch:
            patch.setattr(plane, "note", hang)
            refusals.start()
            await is_writing.wait()
        await refusals.close()

    asyncio.run(asyncio.wait_for(go(), 30))
    names = [entry.actor_name for entry in Log(database).of(tenant_id)]
    assert sorted(names) == ["ann", "bob"], "of the one being written nobody knows"


def test_an_entry_that_cannot_be_written_keeps_no_others_back(
    database: Database, tenant_id: str
) -> None:
    refusals = Refusals(ControlPlane(database, b"secret"))
    add(refusals, party("no-such-tenant", "ann"))
    add(refusals, party(tenant_id, "bob"))
    add(refusals, party("another", "eve"))
    asyncio.run(refusals.write())
    assert [entry.actor_name for entry in Log(database).of(tenant_id)] == ["bob"]


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Log, Caller, bytes]]:
    """What a server wrote until it ended, of a tenant's refusals and all others."""
    with serving(tiny_base, tmp_path_factory.mktemp("refusing"), engine=FAKE_ENGINE) as server:
        caller = server.make_caller("refused")
        _be_refused(server, caller)
    database = server.database
    yield Log(database), caller, database_bytes(server.settings)
    database.close()


def _be_refused(server: ServerUnderTest, caller: Caller) -> None:
    def issue(**changes: object) -> httpx.Client:
        body = {"name": "k", "scopes": ["infer"], **changes}
        key = caller.http.post("/v1/keys", json=body).json()
        headers = {"authorization": f"Bearer {key['key']}"}
        return httpx.Client(base_url=server.url, headers=headers, params={"of": key["id"]})

    with issue(name="narrow") as narrow, issue(name="far", networks=["192.0.2.0/24"]) as far:
        for _ in range(3):
            assert narrow.get("/v1/keys").status_code == 403
        assert narrow.post("/v1/users", json={}, headers={"idempotency-key": "x"}).is_error
        assert far.get("/v1/models").status_code == 403
    with issue(name="gone") as gone:
        caller.http.delete(f"/v1/keys/{gone.params['of']}").raise_for_status()
        assert gone.get("/v1/models").status_code == 401
        again = gone.post("/v1/users", json={}, headers={"idempotency-key": "x"})
        assert again.status_code == 401
    viewer = server.make_operator("looks-on", OperatorRole.VIEWER)
    within = {"authorization": f"Bearer {viewer}", "x-loraplex-tenant": caller.slug}
    assert httpx.get(f"{server.url}/v1/keys", headers=within).status_code == 403
    assert httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer x"}).is_error
    _fail_to_sign_in(server, caller)


def _fail_to_sign_in(server: ServerUnderTest, caller: Caller) -> None:
    user = caller.http.post("/v1/users", json={"email": "ann@acme.example", "role": "owner"}).json()
    caller.http.post(f"/v1/users/{user['id']}/invitation").raise_for_status()
    browser = Browser(server.url)
    with browser.http:
        assert browser.sign_in("secret-stranger@acme.example", caller.slug).status_code == 401
        codes = [browser.sign_in("ann@acme.example", caller.slug).status_code for _ in range(6)]
    assert codes == [401, 401, 401, 401, 429, 429], "five failures from one address lock it"


def test_a_tenants_own_refusals_are_in_its_own_log(logged: tuple[Log, Caller, bytes]) -> None:
    log, caller, _ = logged
    signing_in = "POST /v1/session"
    assert told(log.of(caller.tenant_id)) == [
        ("ann@acme.example", signing_in, "sign_in_failed", 4),
        ("ann@acme.example", signing_in, "sign_in_locked", 2),
        ("far", "GET /v1/models", "address_not_allowed", 1),
        ("gone", "GET /v1/models", "invalid_api_key", 1),
        ("gone", "any unmatched", "invalid_api_key", 1),  # before it came to its route
        ("narrow", "GET /v1/keys", "insufficient_scope", 3),
        ("narrow", "POST /v1/users", "insufficient_scope", 1),
    ]


def test_operators_and_strangers_are_in_the_platforms_log_alone(
    logged: tuple[Log, Caller, bytes],
) -> None:
    log, _, _ = logged
    assert told(log.of_platform()) == [
        ("looks-on", "GET /v1/keys", "insufficient_scope", 1),
        ("unknown", "POST /v1/session", "sign_in_failed", 1),
    ]


def test_what_a_stranger_typed_is_nowhere(logged: tuple[Log, Caller, bytes]) -> None:
    assert b"secret-stranger" not in logged[2]


def test_a_suspended_tenants_key_is_in_its_log(database: Database, tenant_id: str) -> None:
    plane = ControlPlane(database, b"secret")
    with database.transaction(tenant_id) as session:
        key = plane.keys.issue(session, name="k", scopes=[Scope.INFER])
    with database.platform_transaction() as platform:
        tenants.set_suspended(tenants.get_tenant(platform, "acme"), True)

    async def refuse() -> Party | None:
        try:
            await plane.authenticate(key.text)
        except TenantSuspended as refusal:
            return refusal.refused
        return None

    assert asyncio.run(refuse()) == Party(tenant_id, Actor(ActorKind.KEY, key.key.id, "k"))
