"""The engine's thread leaves the program its number of CPU threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loraplex.api.offline import engine_thread
from loraplex.api.offline.engine_thread import EngineThread
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineUnavailable

NUM_THREADS = 3
"""Of the program."""


@pytest.fixture(autouse=True)
def _num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


def open_engine(monkeypatch: pytest.MonkeyPatch, load: Callable[[], None]) -> EngineThread:
    """An engine whose loading is `load` alone."""
    core = SimpleNamespace(info=None, close=lambda: None)
    monkeypatch.setattr(engine_thread, "open_parts", lambda _config: load())
    monkeypatch.setattr(engine_thread, "EngineCore", lambda _parts: core)
    return EngineThread(EngineConfig("base"), lambda _key: Path())


def of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(torch.get_num_threads).result()


def test_threads_after_the_engines_end_have_the_programs_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = open_engine(monkeypatch, lambda: torch.set_num_threads(1))
    assert torch.get_num_threads() == NUM_THREADS, "that of this thread is its own"
    assert of_a_new_thread() == 1
    engine.close()
    assert of_a_new_thread() == NUM_THREADS
    engine.close()


def test_threads_after_a_failed_load_have_the_programs_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        torch.set_num_threads(1)
        raise EngineUnavailable("no room")

    with pytest.raises(EngineUnavailable):
        open_engine(monkeypatch, fail)
    assert of_a_new_thread() == NUM_THREADS


def test_a_second_engine_begins_with_the_programs_number(monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_engine(monkeypatch, lambda: torch.set_num_threads(1))
    seen: list[int] = []
    second = open_engine(monkeypatch, lambda: seen.append(torch.get_num_threads()))
    assert seen == [NUM_THREADS]
    second.close()
    first.close()
