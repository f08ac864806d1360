"""Revision 0006 with data: the uses that there are begin with the ledger's sums."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import column, table

from loraplex.platform import revisions
from loraplex.platform.base import UtcDateTime, utc_now
from loraplex.platform.database import Database, make_engine
from loraplex.platform.overview.models import AdapterUse
from loraplex.platform.usage.models import UsageDay
from support.databases import new_postgres_url, new_sqlite_url

TENANT = "tenant"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
REQUESTS = {0: 5, 29: 7, 30: 1000}
"""By how many days ago."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database at revision 0005, with an adapter that was asked on three days."""
    opened = new_sqlite_url(tmp_path) if request.param == "sqlite" else new_postgres_url()
    with opened as url:
        revisions.upgrade(url, "0005")
        engine = make_engine(url)
        moment, today = UtcDateTime(), utc_now().date()
        columns = (*map(column, ("id", "slug", "weight")), column("created_at", moment))
        tenant = {"id": TENANT, "slug": "t", "weight": 1.0, "created_at": BEGIN}
        uses = table(
            "adapter_uses",
            *map(column, ("tenant_id", "adapter_name", "latency_counts", "p95_ms")),
            column("last_used_at", moment),
        )
        with engine.begin() as connection:
            connection.execute(table("tenants", *columns).insert(), tenant)
            for name in ("bot", "idle"):
                use = {"tenant_id": TENANT, "adapter_name": name, "last_used_at": BEGIN}
                connection.execute(uses.insert(), {**use, "latency_counts": "{}", "p95_ms": 1.0})
        engine.dispose()
        database = Database(url)
        with database.transaction(TENANT) as session:
            for back, number in REQUESTS.items():
                day = UsageDay.begin(today - timedelta(days=back), "bot", 1)
                day.num_requests = number
                session.add(day)
        database.close()
        yield url


def test_uses_get_the_requests_of_the_last_days(url: str) -> None:
    revisions.upgrade(url)
    database = Database(url)
    with database.transaction(TENANT, read_only=True) as session:
        assert session.get_one(AdapterUse, (TENANT, "bot")).num_requests == 5 + 7
        assert session.get_one(AdapterUse, (TENANT, "idle")).num_requests == 0
    database.close()
    revisions.downgrade(url, "0005")
    revisions.upgrade(url)
