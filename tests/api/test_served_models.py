"""What the `model` of a request means, and when the database is asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.inference.seen_adapters import FRESH_SECONDS, SeenAdapters
from loraplex.api.inference.served_models import ServedModel, ServedModels
from loraplex.api.inference.version_tokenizers import VersionTokenizers
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.composition_names import NamedMember
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterNotComposable,
    AdapterNotReady,
    BaseMismatch,
    DatabaseUnavailable,
    InvalidComposition,
    ModelNotFound,
)
from loraplex.platform.keys.principal import ALL_SCOPES, Scope
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

    def resolve(
        self,
        model: str,
        adapters: list[str] | None = None,
        *,
        added: Sequence[NamedMember] = (),
        **grant: Any,
    ) -> ServedModel:
        """`adapters`: those that the key may use; `added`: those of the request beside `model`."""
        caller = caller_of(self.tenant, adapters=adapters, **grant)
        return asyncio.run(self._models.resolve(caller, model, adapters=added))


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


def test_a_composition_is_the_weighted_sum_of_the_versions_that_its_names_mean(
    world: World,
) -> None:
    world.add("sql", content="one")
    world.add("sql", content="two")
    model = world.resolve("sql@1:0.5+support-bot+acme/sql@latest:-2")
    assert model.name == "acme/sql@1:0.5+acme/support-bot@1+acme/sql@2:-2.0"
    assert model.adapter is model.adapters[0]
    assert model.key is not None
    first, second, third = (each.key.digest for each in model.adapters)
    weights = {member.digest: member.weight for member in model.key.members}
    assert weights == {first: 0.5, second: 1.0, third: -2.0}
    assert model.key.tenant_id == world.tenant.id
    assert world.resolve(model.name).key == model.key


def test_added_adapters_and_names_with_weights_mean_the_same(world: World) -> None:
    world.add("sql", content="one")
    named = world.resolve("support-bot+sql:0.5")
    half = NamedMember("sql", 0.5)
    assert world.resolve("support-bot", added=[half]).key == named.key
    assert world.resolve("base", added=[half, NamedMember("support-bot")]).key == named.key
    assert world.resolve("sql:.50+support-bot:1.0").key == named.key
    assert world.resolve("base", added=[NamedMember("sql")]) == world.resolve("sql")
    assert world.resolve("sql:1") == world.resolve("sql")


def test_every_adapter_of_a_composition_must_be_the_keys(world: World) -> None:
    world.add("sql", content="one")
    assert world.resolve("sql+support-bot", ["sql", "support-bot"]).composition is not None
    for model in ("sql+support-bot", "support-bot+sql", "sql:0+support-bot"):
        with pytest.raises(ModelNotFound):
            world.resolve(model, ["sql"])
    for model in ("sql+bolt/support-bot", "sql+nobody", "sql+", "+sql", "sql++support-bot"):
        with pytest.raises(ModelNotFound):
            world.resolve(model)


def test_a_key_without_the_scope_composes_nothing(world: World) -> None:
    world.add("sql", content="one")
    scopes = ALL_SCOPES - {Scope.ADAPTERS_COMPOSE}
    assert world.resolve("sql", scopes=scopes).adapter is not None
    for model, added in (("sql:0.5", []), ("sql", [NamedMember("support-bot")])):
        with pytest.raises(ApiError) as refusal:
            world.resolve(model, scopes=scopes, added=added)
        assert refusal.value.code == "insufficient_scope"


def test_the_same_version_twice_and_what_is_no_sum_are_refused(world: World) -> None:
    world.add("sql", content="one")
    world.add("twin", content="one")
    with world.database.transaction(world.tenant.id) as session:
        version = make_version(session, "dora", content="three")
        version.intake_report = {**version.intake_report, "features": ["lora", "dora"]}
    for model in ("sql+sql:0.5", "sql+sql@1", "sql+twin", "sql:2.5"):
        with pytest.raises(InvalidComposition):
            world.resolve(model)
    with pytest.raises(InvalidComposition):
        world.resolve("sql", added=[NamedMember(name) for name in ("a", "b", "c", "d")])
    assert world.resolve("dora").adapter is not None
    for model in ("sql+dora", "dora:0.5"):
        with pytest.raises(AdapterNotComposable):
            world.resolve(model)


def test_a_composition_ends_with_the_deletion_of_a_member(world: World) -> None:
    world.add("sql", content="one")
    world.resolve("sql+support-bot")
    with world.database.transaction(world.tenant.id) as session:
        catalog.begin_version_deletion(session, "sql", 1)
    world.seen.note_change(world.tenant.id)
    with pytest.raises(ModelNotFound):
        world.resolve("sql+support-bot")
