"""Revision 0003 with data: what was used before counts, and no key gains by the way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from loraplex.platform import revisions
from loraplex.platform.database import Database, make_engine
from loraplex.platform.usage import service as usage
from loraplex.platform.usage.repository import Group, UsageQuery
from support.databases import new_postgres_url, new_sqlite_url

TENANT = "tenant"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database at revision 0002 with one tenant."""
    with ExitStack() as stack:
        opened = new_sqlite_url(tmp_path) if request.param == "sqlite" else new_postgres_url()
        url = stack.enter_context(opened)
        revisions.upgrade(url, "0002")
        engine = make_engine(url)
        add(engine, "tenants", id=TENANT, slug="acme", created_at=BEGIN)
        engine.dispose()
        yield url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = make_engine(url)
    yield engine
    engine.dispose()


def add(engine: Engine, table: str, **row: object) -> None:
    is_sqlite = engine.dialect.name == "sqlite"
    values = {
        # As the models write it there.
        name: value.strftime("%Y-%m-%d %H:%M:%S.%f")
        if is_sqlite and isinstance(value, datetime)
        else value
        for name, value in row.items()
    }
    names = ", ".join(values)
    places = ", ".join(f":{name}" for name in values)
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({places})"), values)


def test_what_was_used_before_there_were_sums_is_summed(url: str, engine: Engine) -> None:
    late, next_day = datetime(2026, 1, 1, 23, 59, 59, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    requests = [(BEGIN, "bot", 3), (late, "bot", 3), (late, None, None), (next_day, "bot", 3)]
    for number, (moment, adapter, version) in enumerate(requests):
        add(
            engine,
            "usage_records",
            request_id=f"req-{number}",
            tenant_id=TENANT,
            adapter_name=adapter,
            adapter_version=version,
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=2,
            finish_reason="stop",
            created_at=moment,
        )
    revisions.upgrade(url)
    database = Database(url)
    with database.transaction(TENANT, read_only=True) as session:
        groups = (Group.DAY, Group.ADAPTER, Group.VERSION)
        sums = usage.sum_usage(session, UsageQuery(groups))
    database.close()
    assert [(each.key, *each[1:5]) for each in sums] == [
        ((date(2026, 1, 1), "", 0), 1, 10, 4, 2),
        ((date(2026, 1, 1), "bot", 3), 2, 20, 8, 4),
        ((date(2026, 1, 2), "bot", 3), 1, 10, 4, 2),
    ]


def add_key(engine: Engine, key_id: str, scopes: list[str], **columns: object) -> None:
    row = {"mac": bytes(32), "created_at": BEGIN, "scopes": json.dumps(scopes), **columns}
    add(engine, "api_keys", id=key_id, tenant_id=TENANT, name=key_id, **row)


def test_on_the_way_back_no_key_gains_and_restricted_ones_end(url: str, engine: Engine) -> None:
    revisions.upgrade(url)
    user = {"id": "ada", "email": "ada@example.com", "role": "viewer", "created_at": BEGIN}
    add(engine, "users", tenant_id=TENANT, **user)
    add_key(engine, "plain", ["infer", "usage:read"])
    add_key(engine, "new", ["audit:read", "infer", "keys:manage"])
    add_key(engine, "adapters", ["infer"], adapters='["bot"]')
    add_key(engine, "networks", ["infer"], networks='["10.0.0.0/8"]')
    add_key(engine, "user", ["adapters:read"], user_id="ada")
    revisions.downgrade(url, "0002")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, scopes, revoked_at FROM api_keys")).all()
    scopes = {row.id: json.loads(row[1]) if isinstance(row[1], str) else row[1] for row in rows}
    assert scopes["plain"] == ["infer", "usage:read"]
    assert scopes["new"] == ["infer"]
    assert {row.id for row in rows if row.revoked_at is None} == {"plain", "new"}
