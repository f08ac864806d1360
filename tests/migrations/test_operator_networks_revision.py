"""Revision 0005 with data: operators' keys go on, and none gains by the way back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from loraplex.platform import revisions
from loraplex.platform.database import Database
from loraplex.platform.errors import ApiKeyRevoked
from loraplex.platform.keys.principal import OperatorRole
from loraplex.platform.operators.service import OperatorService
from support.databases import new_postgres_url, new_sqlite_url
from support.identity import peppers

OPERATORS = OperatorService(peppers("secret"))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an up-to-date database."""
    opened = new_sqlite_url(tmp_path) if request.param == "sqlite" else new_postgres_url()
    with opened as url:
        revisions.upgrade(url)
        yield url


def test_restricted_keys_end_on_the_way_back_and_the_others_go_on(url: str) -> None:
    database = Database(url)
    with database.platform_transaction() as session:
        root = OPERATORS.create(session, "root", OperatorRole.ADMIN)
        free = OPERATORS.issue_key(session, root, name="free").text
        bound = OPERATORS.issue_key(session, root, name="bound", networks=["10.0.0.0/8"])
        ended = OPERATORS.issue_key(session, root, name="ended", networks=["10.0.0.0/8"]).key
        ended.revoked_at = then = ended.created_at + timedelta(hours=1)
    database.close()

    revisions.downgrade(url, "0004")
    revisions.upgrade(url)

    database = Database(url)
    with database.platform_transaction(read_only=True) as session:
        assert OPERATORS.authenticate(session, free).principal.networks is None
        with pytest.raises(ApiKeyRevoked):
            OPERATORS.authenticate(session, bound.text)
        keys = {key.name: key for key in OPERATORS.list_keys(session, "root")}
        assert keys["ended"].revoked_at == then
        assert keys["bound"].networks is None
    database.close()
