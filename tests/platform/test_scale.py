"""Listing, resolving and registering cost the same for few and for many adapters of a tenant."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from sqlalchemy import insert, text

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import uploads, wishes
from loraplex.platform.adapters.canary import Canary
from loraplex.platform.adapters.listing import (
    AdapterOrder,
    AdapterQuery,
    AdapterSummary,
    list_summaries,
)
from loraplex.platform.adapters.models import Adapter, AdapterAlias, AdapterVersion, Upload
from loraplex.platform.adapters.registry import parse_model_name, resolve
from loraplex.platform.adapters.states import UploadState, VersionState, WishKind
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.base import new_id
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import BASE_ID, bring_to, make_digest, make_new_version, make_version
from support.statements import (
    Statement,
    counted_steps,
    num_rows_read_by_postgres,
    recorded_statements,
    sqlite_plan,
)

FEW, MANY = 20, 500
NUM_FOR_A_PLAN = 2000
"""PostgreSQL reads a smaller table from its beginning to its end, and is right to."""
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def add_adapters(database: Database, tenant: Tenant, first: int, stop: int) -> None:
    """Adapters with a ready version, an alias and an upload; as many again that were deleted."""
    adapters, versions, aliases, pushed = [], [], [], []
    for number in range(first, stop):
        for kind, state in (("bot", VersionState.READY), ("gone", VersionState.DELETED)):
            content = f"{kind} {number}"
            adapter = {
                "id": new_id(),
                "tenant_id": tenant.id,
                "name": f"{kind}-{number:06}",
                "is_visible": state is VersionState.READY,
                "created_at": NOW,
            }
            version = {
                "id": new_id(),
                "tenant_id": tenant.id,
                "adapter_id": adapter["id"],
                "number": 1,
                "digest": make_digest(content),
                "base_id": BASE_ID,
                "object_sha256": hashlib.sha256(content.encode()).hexdigest(),
                "size_bytes": 1,
                "state": state,
                "state_changed_at": NOW,
                "intake_report": {},
                "created_at": NOW,
            }
            adapters.append(adapter)
            versions.append(version)
            pushed.append(
                {
                    "id": new_id(),
                    "tenant_id": tenant.id,
                    "adapter_name": adapter["name"],
                    "config_json": "{}",
                    "size_bytes": 1,
                    "sha256": hashlib.sha256(content.encode()).hexdigest(),
                    "received_bytes": 1,
                    "aliases": [],
                    "state": UploadState.ACCEPTED,
                    "version_id": version["id"],
                    "created_at": NOW,
                    "updated_at": NOW,
                    "server_id": "here",
                }
            )
            if state is VersionState.READY:
                alias = {"adapter_id": adapter["id"], "version_id": version["id"], "name": "prod"}
                owned = {"id": new_id(), "tenant_id": tenant.id, "updated_at": NOW}
                aliases.append(alias | owned)
    with database.platform_transaction() as session:
        for entity, rows in (
            (Adapter, adapters),
            (AdapterVersion, versions),
            (AdapterAlias, aliases),
            (Upload, pushed),
        ):
            session.execute(insert(entity), rows)
        is_postgres = session.get_bind().dialect.name == "postgresql"
        if is_postgres:
            session.connection().execute(text("ANALYZE"))


def list_a_page(session: TenantSession) -> None:
    first = list_summaries(session, AdapterQuery(), limit=5)
    page = list_summaries(session, AdapterQuery(), after=first[-1].cursor, limit=10)
    assert [entry.adapter.name for entry in page][:2] == ["bot-000005", "bot-000006"]
    assert len(page) == 10


def list_the_last_page(session: TenantSession) -> None:
    # Before the last lie all those that were deleted, and then the others.
    backwards = AdapterQuery(order=AdapterOrder.NAME_DOWN)
    (last,) = list_summaries(session, backwards, limit=1)
    assert last.adapter.name == "watched"
    (before,) = list_summaries(session, backwards, after=last.cursor, limit=1)
    assert before.adapter.name.startswith("bot-")
    rest = list_summaries(session, AdapterQuery(), after=_as_ascending(before), limit=10)
    assert [entry.adapter.name for entry in rest] == ["watched"]


def _as_ascending(entry: AdapterSummary) -> str:
    """The place of this entry in the list by name."""
    _, place, name, slug = json.loads(base64.urlsafe_b64decode(entry.cursor))
    return base64.urlsafe_b64encode(
        json.dumps([AdapterOrder.NAME, place, name, slug]).encode()
    ).decode()


def resolve_names(session: TenantSession) -> None:
    for suffix in ("", "@prod", "@latest", "@1", f"@{make_digest('watched')}"):
        name = parse_model_name("watched" + suffix)
        reference = resolve(session, name, tenant_slug="acme").of("r", base_id=BASE_ID)
        assert reference.name == "watched"


def register(session: TenantSession) -> None:
    declared = NewUpload(
        adapter_name="new", config_json="{}", size_bytes=1, sha256="ab" * 32, server_id="here"
    )
    upload = uploads.open_or_resume_upload(session, declared)
    uploads.advance_upload(session, upload.id, offset=0, num_bytes=1)
    uploads.begin_validation(session, upload.id)
    version, is_new = catalog.create_version(session, make_new_version("new", "new"))
    assert is_new
    uploads.mark_accepted(session, upload.id, version.id)
    bring_to(session, version, VersionState.READY)
    assert uploads.list_wanted_aliases(session, version.id) == []
    catalog.set_alias(session, "new", "prod", version.number)


def change_an_alias(session: TenantSession) -> None:
    catalog.set_alias(session, "watched", "prod", 1, canary=Canary(2, 10))
    catalog.rollback_alias(session, "watched", "prod")
    assert len(catalog.list_alias_changes(session, "watched", "prod")) == 3


def wish(session: TenantSession) -> None:
    wishes.set_wish(session, "watched", 1, WishKind.PIN, max_pins=3, now=NOW)
    assert len(wishes.list_wishes(session, "watched", now=NOW)) == 1
    assert wishes.remove_wish(session, "watched", 1, WishKind.PIN)


def delete_an_adapter(session: TenantSession) -> None:
    for deletion in catalog.begin_adapter_deletion(session, "watched"):
        assert not deletion.is_content_shared
        catalog.finish_deletion(session, deletion.version_id, receipt={})
    assert len(catalog.list_receipts(session, "watched")) == 2
    assert len(catalog.list_transitions(session, "watched", 1)) == 5


WORK = [
    list_a_page,
    list_the_last_page,
    resolve_names,
    register,
    change_an_alias,
    wish,
    delete_an_adapter,
]
EVERY_WORK = pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)


@pytest.fixture
def watched(database: Database, acme: Tenant, bolt: Tenant) -> Tenant:
    """Acme with few adapters and one that is looked at, beside a tenant that has many."""
    with database.transaction(acme.id) as session:
        for content in ("watched", "watched too"):
            make_version(session, "watched", content)
        catalog.set_alias(session, "watched", "prod", 1)
    add_adapters(database, acme, 0, FEW)
    add_adapters(database, bolt, 0, FEW)
    return acme


def record(
    database: Database, tenant: Tenant, work: Callable[[TenantSession], None]
) -> list[Statement]:
    """The statements of the work, of which nothing is kept."""
    with database.transaction(tenant.id) as session:
        with recorded_statements(session) as statements:
            work(session)
        session.rollback()
    return statements


@EVERY_WORK
def test_the_number_of_statements_does_not_grow(
    database: Database,
    watched: Tenant,
    work: Callable[[TenantSession], None],
) -> None:
    before = [statement.text for statement in record(database, watched, work)]
    add_adapters(database, watched, FEW, 10 * FEW)
    assert [statement.text for statement in record(database, watched, work)] == before


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@EVERY_WORK
def test_sqlite_works_no_harder(
    database: Database,
    watched: Tenant,
    bolt: Tenant,
    work: Callable[[TenantSession], None],
) -> None:
    def count() -> int:
        with database.transaction(watched.id) as session:
            with counted_steps(session) as steps:
                work(session)
            session.rollback()
        return steps[0]

    with_few = count()
    for tenant in (watched, bolt):
        add_adapters(database, tenant, FEW, MANY)
    assert 0 < count() <= 1.02 * with_few


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@EVERY_WORK
def test_sqlite_searches_by_an_index(
    database: Database, watched: Tenant, work: Callable[[TenantSession], None]
) -> None:
    selects = [each for each in record(database, watched, work) if each.is_select]
    assert selects
    with database.platform_transaction(read_only=True) as session:
        for statement in selects:
            for line in sqlite_plan(session, statement):
                assert not line.startswith("SCAN"), (line, statement.text)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    "work", [list_a_page, list_the_last_page, resolve_names], ids=lambda work: work.__name__
)
def test_postgres_reads_a_bounded_number_of_rows(
    database: Database, watched: Tenant, bolt: Tenant, work: Callable[[TenantSession], None]
) -> None:
    for tenant in (watched, bolt):
        add_adapters(database, tenant, FEW, NUM_FOR_A_PLAN)
    statements = record(database, watched, work)
    with database.platform_transaction(read_only=True) as session:
        for statement in statements:
            assert num_rows_read_by_postgres(session, statement) <= 40, statement.text
