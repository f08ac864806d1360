"""Revision 0007 with data: what keys did stays theirs, there and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from loraplex.platform import revisions
from loraplex.platform.adapters import service as catalog
from loraplex.platform.database import Database, make_engine
from loraplex.platform.keys.principal import Actor, ActorKind
from loraplex.platform.keys.service import ApiKeyService
from support.catalog import make_tenant, make_version
from support.databases import new_postgres_url, new_sqlite_url
from support.identity import peppers

CHANGES = "SELECT changed_by FROM adapter_alias_changes ORDER BY number"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an up-to-date database."""
    opened = new_sqlite_url(tmp_path) if request.param == "sqlite" else new_postgres_url()
    with opened as url:
        revisions.upgrade(url)
        yield url


def authors(url: str) -> list[str | None]:
    engine = make_engine(url)
    with engine.connect() as connection:
        found = list(connection.execute(text(CHANGES)).scalars())
    engine.dispose()
    return found


def test_keys_stay_authors_and_others_are_lost_on_the_way_back(url: str) -> None:
    database = Database(url)
    tenant = make_tenant(database, "acme")
    with database.transaction(tenant.id) as session:
        issued = ApiKeyService(peppers("secret")).issue(session, name="ci", scopes=[])
        key = Actor(ActorKind.KEY, issued.key.id, "ci")
        user = Actor(ActorKind.USER, "an id", "ada@example.com")
        for number, by in enumerate([key.author, user.author, "key:is-no-key", None], 1):
            make_version(session, content=f"content {number}")
            catalog.set_alias(session, "support-bot", "prod", number, changed_by=by)
    database.close()
    assert authors(url) == [f"key:{key.id}", "user:ada@example.com", "key:is-no-key", None]

    revisions.downgrade(url, "0006")
    assert authors(url) == [key.id, None, None, None]
    revisions.upgrade(url)
    assert authors(url) == [f"key:{key.id}", None, None, None]
