"""A tenant's session reads and writes that tenant's rows only, whatever the query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
from sqlalchemy import (
    Executable,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import aliased, selectinload

from loraplex.platform.adapters.history import AliasChange, DeletionReceipt, VersionTransition
from loraplex.platform.adapters.models import (
    Adapter,
    AdapterAlias,
    AdapterVersion,
    AdapterWish,
    Upload,
)
from loraplex.platform.base import TenantOwned
from loraplex.platform.database import Database
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.models import Base
from loraplex.platform.pinned_statements import is_pinned
from loraplex.platform.sessions import ScopeViolation, TenantSession, TenantStatements
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage.models import UsageRecord
from support.catalog import make_version


@pytest.fixture
def acme_session(database: Database, acme: Tenant, bolt: Tenant) -> Iterator[TenantSession]:
    """Acme's session; both tenants have an adapter of the same name and content."""
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            make_version(session, "support-bot")
    with database.transaction(acme.id) as session:
        yield session
        session.rollback()


def foreign_adapter_id(database: Database, bolt: Tenant) -> str:
    with database.transaction(bolt.id, read_only=True) as session:
        return session.scalars(select(Adapter.id)).one()


def test_every_table_but_the_platforms_own_is_a_tenants() -> None:
    unowned = {
        mapper.class_.__name__
        for mapper in Base.registry.mappers
        if not issubclass(mapper.class_, TenantOwned)
    }
    assert unowned == {
        "Currency",
        "IdempotentAnswer",
        "JobLease",
        "Operator",
        "OperatorKey",
        "PlatformAuditEntry",
        "PlatformAuditHead",
        "PriceRow",
        "Replica",
        "Server",
        "ServerMemory",
        "ServerSample",
        "SignInFailures",
        "SpentFlow",
        "Tenant",
        "TenantDeletion",
    }


@pytest.mark.parametrize("entity", [Adapter, AdapterVersion])
def test_selects_own_rows_only(
    acme_session: TenantSession, acme: Tenant, entity: type[TenantOwned]
) -> None:
    rows = acme_session.scalars(select(entity)).all()
    assert [row.tenant_id for row in rows] == [acme.id]


def test_selects_columns_of_own_rows_only(acme_session: TenantSession, acme: Tenant) -> None:
    assert acme_session.scalars(select(AdapterVersion.tenant_id)).all() == [acme.id]


def test_counts_own_rows_only(acme_session: TenantSession) -> None:
    assert acme_session.scalar(select(func.count()).select_from(Adapter)) == 1


def test_narrows_aliased_entities(acme_session: TenantSession, acme: Tenant) -> None:
    other = aliased(Adapter)
    assert acme_session.scalars(select(other.tenant_id)).all() == [acme.id]


def test_narrows_joins(acme_session: TenantSession) -> None:
    query = select(Adapter.id, AdapterVersion.id).join(
        AdapterVersion, AdapterVersion.digest.is_not(None)
    )
    assert len(acme_session.execute(query).all()) == 1


def test_narrows_subqueries(acme_session: TenantSession, bolt: Tenant) -> None:
    foreign = exists().where(AdapterVersion.tenant_id == bolt.id)
    assert acme_session.scalars(select(Adapter).where(foreign)).all() == []


def test_narrows_relationships(acme_session: TenantSession, acme: Tenant) -> None:
    query = select(Adapter).options(selectinload(Adapter.versions))
    versions = [version for adapter in acme_session.scalars(query) for version in adapter.versions]
    assert [version.tenant_id for version in versions] == [acme.id]


def test_sees_no_tenant_but_its_own(acme_session: TenantSession, acme: Tenant) -> None:
    assert acme_session.scalars(select(Tenant.id)).all() == [acme.id]
    assert acme_session.scalars(select(aliased(Tenant).id)).all() == [acme.id]


def test_gets_no_foreign_row_by_its_id(
    acme_session: TenantSession, database: Database, bolt: Tenant
) -> None:
    assert acme_session.get(Adapter, foreign_adapter_id(database, bolt)) is None


def test_does_not_mix_up_tenants_that_ran_the_same_query(
    database: Database, acme_session: TenantSession, acme: Tenant, bolt: Tenant
) -> None:
    # Compiled statements are cached: the tenant must be a parameter of theirs, not a part.
    for tenant in (acme, bolt, acme):
        with database.transaction(tenant.id, read_only=True) as session:
            assert session.scalars(select(Adapter.tenant_id)).all() == [tenant.id]


@pytest.mark.parametrize(
    "statement",
    [
        text("SELECT * FROM adapters"),
        select(Adapter.__table__),
        select(literal_column("1")),
        insert(Adapter).values(id="x", tenant_id="x", name="x"),
        update(Adapter).values(name="y"),
        delete(Adapter),
        Base.metadata.tables["adapters"].delete(),
    ],
    ids=["text", "core select", "literal", "insert", "update", "delete", "core delete"],
)
def test_refuses_what_it_cannot_narrow(acme_session: TenantSession, statement: object) -> None:
    with pytest.raises(ScopeViolation):
        acme_session.execute(statement)  # type: ignore[call-overload]


QUOTAS, BUCKETS = Base.metadata.tables["quotas"], Base.metadata.tables["rate_buckets"]
OWN_QUOTA, OWN_BUCKETS = (
    table.c.tenant_id == bindparam("tenant_id") for table in (QUOTAS, BUCKETS)
)
ADD_BUCKET = sqlite.insert(BUCKETS).values(level=1.0)


@pytest.mark.parametrize(
    "statement",
    [
        text("SELECT * FROM quotas WHERE tenant_id = :tenant_id"),
        select(QUOTAS),
        select(func.count()).select_from(QUOTAS),
        select(func.count()).select_from(QUOTAS).where(OWN_BUCKETS),
        select(QUOTAS).where(OWN_QUOTA, text("adapters > 1 OR users > 1")),
        select(QUOTAS).where(QUOTAS.c.tenant_id == "another"),
        select(QUOTAS).where(QUOTAS.c.tenant_id != bindparam("tenant_id")),
        select(QUOTAS).where(OWN_QUOTA | (QUOTAS.c.adapters > 1)),
        select(QUOTAS.c.adapters, BUCKETS.c.level).where(OWN_QUOTA),
        select(QUOTAS).join(BUCKETS, BUCKETS.c.level > 0).where(OWN_QUOTA),
        select(QUOTAS).where(OWN_QUOTA, exists(select(BUCKETS.c.kind))),
        select(QUOTAS).where(OWN_QUOTA).union(select(QUOTAS)),
        update(QUOTAS).where(OWN_QUOTA).values(tenant_id=func.lower("Another")),
        delete(QUOTAS),
        delete(QUOTAS).where(OWN_QUOTA, QUOTAS.c.adapters == BUCKETS.c.level),
        insert(QUOTAS).values(tenant_id=func.lower("Another")),
        insert(QUOTAS).values([{"tenant_id": "one"}, {"tenant_id": "two"}]),
        insert(QUOTAS).values(adapters=text("(SELECT max(adapters) FROM quotas)")),
        insert(QUOTAS).from_select(["tenant_id"], select(BUCKETS.c.tenant_id)),
        insert(Base.metadata.tables["servers"]),
        ADD_BUCKET.on_conflict_do_update(index_elements=["kind"], set_={"level": 0.0}),
    ],
)
def test_runs_no_plain_statement_that_is_not_narrowed_to_the_tenant(
    database: Database, acme_session: TenantSession, acme: Tenant, statement: Executable
) -> None:
    with pytest.raises(ScopeViolation):
        acme_session.execute_pinned(statement, {})
    with pytest.raises(ScopeViolation):  # and on the second try, when it has been judged
        TenantStatements(acme_session.connection(), acme.id).execute_pinned(statement, {})


@pytest.mark.parametrize(
    "statement",
    [
        select(QUOTAS).where(OWN_QUOTA),
        select(QUOTAS).where(OWN_QUOTA, (QUOTAS.c.adapters > 1) | (QUOTAS.c.users > 1)),
        select(QUOTAS, BUCKETS).where(OWN_QUOTA, OWN_BUCKETS, BUCKETS.c.level > 0),
        select(func.count()).select_from(QUOTAS).where(OWN_QUOTA),
        delete(QUOTAS).where(OWN_QUOTA),
        insert(QUOTAS),
        ADD_BUCKET.on_conflict_do_nothing(index_elements=["kind"]),
        ADD_BUCKET.on_conflict_do_update(index_elements=["tenant_id", "kind"], set_={"level": 0.0}),
    ],
)
def test_plain_statements_may_narrow_themselves(statement: Executable) -> None:
    assert is_pinned(statement)


def test_plain_statements_run_once_for_each_of_their_values(
    acme_session: TenantSession, acme: Tenant
) -> None:
    bucket = {"level": 1.0, "clock": "clock", "updated_at": 0.0}
    acme_session.execute_pinned(insert(BUCKETS), {"kind": "requests", **bucket})
    several = [{"kind": kind, **bucket} for kind in ("input_tokens", "output_tokens")]
    acme_session.execute_pinned(insert(BUCKETS), several)
    query = select(BUCKETS.c.tenant_id, BUCKETS.c.kind).where(OWN_BUCKETS)
    found = acme_session.execute_pinned(query, {})
    assert sorted((row.tenant_id, str(row.kind)) for row in found) == [
        (acme.id, kind) for kind in ("input_tokens", "output_tokens", "requests")
    ]


def test_a_reader_runs_plain_selects_and_no_other_statements(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id, read_only=True) as session:
        assert session.execute_pinned(select(QUOTAS).where(OWN_QUOTA), {}).all() == []
        for statement in (insert(QUOTAS), delete(QUOTAS).where(OWN_QUOTA)):
            with pytest.raises(ScopeViolation):
                session.execute_pinned(statement, {})


def add_another(session: TenantSession, adapter: Adapter) -> None:
    session.add(Adapter(name="new"))


def remove(session: TenantSession, adapter: Adapter) -> None:
    session.delete(adapter)


def rename(session: TenantSession, adapter: Adapter) -> None:
    adapter.name = "renamed"


@pytest.mark.parametrize("change", [add_another, remove, rename])
def test_a_reader_changes_no_rows(
    database: Database, acme: Tenant, change: Callable[[TenantSession, Adapter], None]
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "support-bot")
    with database.transaction(acme.id, read_only=True) as session:
        adapter = session.scalars(select(Adapter)).one()
        adapter.name = "support-bot"  # as it was
        session.flush()
        change(session, adapter)
        with pytest.raises(ScopeViolation):
            session.flush()
        session.rollback()


def test_gives_new_rows_its_tenant(acme_session: TenantSession, acme: Tenant) -> None:
    adapter = Adapter(name="new")
    acme_session.add(adapter)
    acme_session.flush()
    assert adapter.tenant_id == acme.id


@pytest.mark.parametrize(
    "entity",
    [
        Adapter,
        AdapterAlias,
        AdapterVersion,
        AdapterWish,
        AliasChange,
        ApiKey,
        DeletionReceipt,
        Upload,
        UsageRecord,
        VersionTransition,
    ],
)
def test_refuses_new_rows_of_another_tenant(
    acme_session: TenantSession, bolt: Tenant, entity: type[Base]
) -> None:
    acme_session.add(entity(tenant_id=bolt.id))
    with pytest.raises(ScopeViolation):
        acme_session.flush()


def test_refuses_to_give_a_row_away(acme_session: TenantSession, bolt: Tenant) -> None:
    acme_session.scalars(select(Adapter)).one().tenant_id = bolt.id
    with pytest.raises(ScopeViolation):
        acme_session.flush()


def test_refuses_rows_of_another_session(
    acme_session: TenantSession, database: Database, bolt: Tenant
) -> None:
    with database.transaction(bolt.id, read_only=True) as session:
        foreign = session.scalars(select(Adapter)).one()
    acme_session.add(foreign)
    acme_session.delete(foreign)
    with pytest.raises(ScopeViolation):
        acme_session.flush()


def test_refuses_to_make_tenants(acme_session: TenantSession) -> None:
    acme_session.add(Tenant(slug="sneaky", created_at=datetime.now(UTC)))
    with pytest.raises(ScopeViolation):
        acme_session.flush()
