"""Suspects of a crash, computed separately by the real engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest

from loraplex.engine.heartbeat import Heartbeat
from support.engine import LocalEngine
from support.models import make_adapter

PROMPT = list(range(20))
NUM_LONE_STEPS = 3
MAX_TOKENS = 8


class Steps:
    """A heartbeat that keeps the names of every step."""

    def __init__(self) -> None:
        self.named: list[list[str]] = []

    def begin_step(self, request_ids: Iterable[str]) -> None:
        self.named.append(list(request_ids))

    def beat(self) -> None:
        pass


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(tiny_base, tmp_path)
    yield engine
    engine.close()


def test_suspects_of_an_adapter_run_apart_until_their_lone_steps_are_over_and_answer_the_same(
    engine: LocalEngine, tiny_base: Path, tmp_path: Path
) -> None:
    adapter = engine.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    first = engine.submit(PROMPT, adapter, max_tokens=MAX_TOKENS)
    engine.run()
    expected = engine.answers[first].token_ids
    steps = Steps()
    engine.core.report_progress_to(cast(Heartbeat, steps))
    lone = [
        engine.submit(PROMPT, adapter, num_lone_steps=NUM_LONE_STEPS, max_tokens=MAX_TOKENS)
        for _ in range(2)
    ]
    others = [engine.submit(PROMPT, adapter, max_tokens=MAX_TOKENS) for _ in range(2)]
    engine.run()
    assert engine.tokens([*lone, *others]) == [expected] * 4
    named = [sorted(names) for names in steps.named if set(names) & set(lone)]
    assert named[:NUM_LONE_STEPS] == [sorted(lone)] * NUM_LONE_STEPS
    assert all(names == sorted([*lone, *others]) for names in named[NUM_LONE_STEPS:])
    assert any(sorted(names) == sorted(others) for names in steps.named)
