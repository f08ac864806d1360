"""A server only migrates its own embedded database."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import inspect

from loraplex.api.server.planes import open_control_plane
from loraplex.api.settings import Settings
from loraplex.platform.database import Database, make_engine
from loraplex.platform.errors import RevisionMismatch
from support.databases import new_postgres_url


def test_a_postgresql_that_is_behind_is_left_as_it_is(tmp_path: Path) -> None:
    with new_postgres_url() as url:
        with pytest.raises(RevisionMismatch, match="loraplex db upgrade"):
            open_control_plane(Settings(data_dir=tmp_path, database=url))
        engine = make_engine(url)
        assert inspect(engine).get_table_names() == []
        engine.dispose()


def test_the_embedded_database_is_brought_up_to_date(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    open_control_plane(settings).close()
    database = Database(settings.database_url)
    database.check_revision()
    database.close()
