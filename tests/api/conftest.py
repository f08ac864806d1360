"""One real server for all tests of the API, and adapters to push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from loraplex.platform.database import Database
from support.databases import copy_of_migrated_sqlite
from support.server import Caller, ServerUnderTest, serving

_numbers = count(1)


@pytest.fixture(scope="session")
def server(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """A server on SQLite and a local folder, shared by all tests: each makes its own tenants."""
    data_dir = tmp_path_factory.mktemp("server")
    name = ("--served-model-name", "tiny")
    with serving(
        tiny_base,
        data_dir,
        *name,
        LORAPLEX_MAX_PINS="2",
        LORAPLEX_TUNING="true",
        TEST_TRAINER="support.fake_trainer",
    ) as running:
        yield running


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """A migrated, empty database without a server."""
    database = Database(copy_of_migrated_sqlite(tmp_path))
    yield database
    database.close()


@pytest.fixture
def make_caller(server: ServerUnderTest) -> Callable[[], Caller]:
    """Makes tenants that nobody else uses."""
    return lambda: server.make_caller(f"tenant-{next(_numbers)}")


@pytest.fixture
def caller(make_caller: Callable[[], Caller]) -> Caller:
    """A new tenant's key."""
    return make_caller()


@pytest.fixture(scope="session")
def adapters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three different adapters in PEFT's layout."""
    from support.models import make_adapter  # here: many tests need no torch

    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, directory / str(seed), seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="session")
def resident(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    """A tenant whose adapter `bot` is ready: version 1, alias `prod`."""
    caller = server.make_caller("resident")
    caller.push(adapters[0], "bot", aliases=["prod"])
    return caller
