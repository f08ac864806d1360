"""What the `model` of a request means, and when the database is asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from loraplex.api.inference.seen_adapters import FRESH_SECONDS, SeenAdapters
from loraplex.api.inference.served_models import ServedModel, ServedModels
from loraplex.api.inference.version_tokenizers import VersionTokenizers
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterNotReady,
    BaseMismatch,
    DatabaseUnavailable,
    ModelNotFound,
)
from loraplex.platform.sessions import TenantSession
from support.catalog import BASE_ID, make_tenant, make_version
from support.databases import copy_of_migrated_sqlite
from support.identity import caller_of

Result = TypeVar("Result")


class World:
    """A tenant with an adapter, a database that may be away, and a clock that is set."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.tenant = make_tenant(database, "acme")
        self.now = 1000.0
        self.is_away = False
        self.num_read = 0
        self.seen = SeenAdapters(100.0, clock=lambda: self.now)
        stand_ins: dict[str, Any] = {
            "engine": SimpleNamespace(info=SimpleNamespace(base_id=BASE_ID)),
            "control_plane": self,
            "tokenizers": VersionTokenizers(lambda added: cast(Tokenizer, added)),
        }
        self._models = ServedModels(base_name="base", seen_adapters=self.seen, **stand_ins)
        self.add("support-bot")

    async def read(self, tenant_id: str, query: Callable[[TenantSession], Result]) -> Result:
        self.num_read += 1
        if self.is_away:
            raise DatabaseUnavailable
        with self.database.transaction(tenant_id, read_only=True) as session:
            return query(session)

    def add(self, name: str, **version: Any) -> None:
        with self.database.transaction(self.tenant.id) as session:
            make_version(session, name, **version)

    def resolve(self, model: str, adapters: list[str] | None = None) -> ServedModel:
        caller = caller_of(self.tenant, adapters=adapters)
        return asyncio.run(self._models.resolve(caller, model))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    database = Database(copy_of_migrated_sqlite(tmp_path))
    yield World(database)
    database.close()


def test_the_bases_name_is_the_base_for_whoever_is_not_restricted(world: World) -> None:
    assert world.resolve("base") == ServedModel("base", None)
    with pytest.raises(ModelNotFound):
        world.resolve("base", adapters=["base"])
    assert world.num_read == 0


def test_a_name_is_the_version_that_it_means_for_whoever_may_use_it(world: World) -> None:
    for adapters in (None, ["support-bot"]):
        model = world.resolve("support-bot", adapters)
        assert model.name == "acme/support-bot@1"
        assert model.adapter is not None
        assert (model.adapter.name, model.adapter.version) == ("support-bot", 1)
    with pytest.raises(ModelNotFound):
        world.resolve("support-bot", adapters=["other"])
    for unknown in ("other", "bolt/support-bot", "support-bot@2"):
        with pytest.raises(ModelNotFound):
            world.resolve(unknown)


def test_a_name_is_looked_up_anew_after_seconds_or_a_change(world: World) -> None:
    for _ in range(2):
        world.resolve("support-bot")
    assert world.num_read == 1
    world.seen.note_change(world.tenant.id)
    world.resolve("support-bot")
    assert world.num_read == 2
    world.now += FRESH_SECONDS + 0.1
    world.add("support-bot", content="newer")
    assert world.resolve("support-bot").name == "acme/support-bot@2"
    assert world.num_read == 3


def test_a_name_means_what_it_did_while_the_database_is_away(world: World) -> None:
    world.resolve("support-bot")
    world.is_away = True
    world.now += FRESH_SECONDS + 0.1
    assert world.resolve("support-bot").name == "acme/support-bot@1"
    with pytest.raises(DatabaseUnavailable):
        world.resolve("never-seen")


def test_what_was_deleted_is_not_remembered_when_the_database_goes_away(world: World) -> None:
    world.resolve("support-bot")
    with world.database.transaction(world.tenant.id) as session:
        catalog.begin_adapter_deletion(session, "support-bot")
    world.seen.note_change(world.tenant.id)
    with pytest.raises(ModelNotFound):
        world.resolve("support-bot")
    world.is_away = True
    with pytest.raises(DatabaseUnavailable):
        world.resolve("support-bot")


def test_a_version_that_is_not_ready_is_looked_up_each_time(world: World) -> None:
    world.add("young", state=VersionState.ATTESTING)
    for _ in range(2):
        with pytest.raises(AdapterNotReady):
            world.resolve("young@1")
    assert world.num_read == 2
    world.is_away = True
    with pytest.raises(DatabaseUnavailable):
        world.resolve("young@1")


def test_a_version_for_another_base_is_refused(world: World) -> None:
    world.add("foreign", base_id="another")
    with pytest.raises(BaseMismatch):
        world.resolve("foreign")
