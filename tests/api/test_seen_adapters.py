"""Resolved names are cached for seconds, but never beyond a change by this server."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.api.inference.seen_adapters import FRESH_SECONDS, SeenAdapters
from loraplex.platform.adapters.registry import AdapterRef, Meaning
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.errors import DatabaseUnavailable

STALE_SECONDS = 100.0
STABLE = AdapterRef(
    key=AdapterKey("acme", "sha256:1"),
    adapter_id="a",
    version_id="v",
    tenant_slug="acme",
    name="bot",
    version=1,
    state=VersionState.READY,
    base_id="base",
    object_sha256="00",
    size_bytes=1,
    alias="prod",
)
CANARY = replace(STABLE, key=AdapterKey("acme", "sha256:2"), version=2, is_canary=True)
SPLIT = Meaning("bot", STABLE, CANARY, 50.0)


class World(NamedTuple):
    seen: SeenAdapters
    now: list[float]

    def look_up(self, tenant_id: str = "acme", meaning: Meaning = SPLIT) -> None:
        self.seen.note(tenant_id, meaning, self.seen.begin(tenant_id))


@pytest.fixture
def world() -> World:
    now = [0.0]
    return World(SeenAdapters(STALE_SECONDS, clock=lambda: now[0]), now)


def test_a_name_is_fresh_for_its_time_from_before_the_look_up(world: World) -> None:
    ticket = world.seen.begin("acme")
    world.now[0] = 1.0  # the look-up takes a second
    world.seen.note("acme", SPLIT, ticket)
    world.now[0] = FRESH_SECONDS
    assert world.seen.fresh("acme", "bot") == SPLIT
    assert world.seen.fresh("bolt", "bot") is None
    world.now[0] = FRESH_SECONDS + 0.1
    assert world.seen.fresh("acme", "bot") is None
    assert world.seen.recall("acme", "bot") == SPLIT
    world.now[0] = STALE_SECONDS + 1.1
    with pytest.raises(DatabaseUnavailable):
        world.seen.recall("acme", "bot")


@pytest.mark.parametrize("is_of_platform", [False, True])
def test_a_change_ends_what_is_fresh_at_once(world: World, is_of_platform: bool) -> None:
    world.look_up("acme")
    world.look_up("bolt")
    world.seen.note_change(None if is_of_platform else "acme")
    assert world.seen.fresh("acme", "bot") is None
    assert (world.seen.fresh("bolt", "bot") is None) == is_of_platform
    assert world.seen.recall("acme", "bot") == SPLIT
    world.look_up("acme", Meaning("bot", STABLE))
    assert world.seen.fresh("acme", "bot") == Meaning("bot", STABLE)


def test_a_look_up_that_a_change_overtook_is_not_fresh(world: World) -> None:
    ticket = world.seen.begin("acme")
    world.seen.note_change("acme")
    world.seen.note("acme", SPLIT, ticket)
    assert world.seen.fresh("acme", "bot") is None


def test_a_name_that_meant_nothing_is_forgotten_and_contents_are_not(world: World) -> None:
    world.look_up()
    world.seen.forget("acme", "bot")
    assert world.seen.fresh("acme", "bot") is None
    with pytest.raises(DatabaseUnavailable):
        world.seen.recall("acme", "bot")
    for version in (STABLE, CANARY):
        assert world.seen.recall_content(version.key) == version


def test_a_split_that_is_remembered_goes_on_telling_requests_apart(world: World) -> None:
    world.look_up()
    meaning = world.seen.fresh("acme", "bot")
    assert meaning is not None
    drawn = {f"r{n}": meaning.of(f"r{n}", base_id="base").version for n in range(40)}
    assert set(drawn.values()) == {1, 2}
    assert drawn == {name: SPLIT.of(name, base_id="base").version for name in drawn}
