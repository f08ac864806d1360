"""Speculation changes only the speed: the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from loraplex.engine.messages import SpeculationParams
from support.engine import LocalEngine
from support.speculation import ticking_clock

EAGER = SpeculationParams(num_tokens=5)


class Answers(NamedTuple):
    tokens: dict[str, list[int]]
    num_drafted: int
    num_accepted: int


def answer_all(engine: LocalEngine, folders: Sequence[Path], temperature: float) -> Answers:
    """Of base and adapters in one mixed batch; every second prompt repeats itself."""
    keys = [None, *map(engine.add_adapter, folders)]
    rng = random.Random(1)
    for index in range(8):
        phrase = rng.choices(range(256), k=4 + 5 * index)
        engine.submit(
            3 * phrase if index % 2 else phrase,
            keys[index % len(keys)],
            request_id=str(index),
            max_tokens=30,
            temperature=temperature,
            seed=index,
            repetition_penalty=1.1 if index == 2 else 1.0,
            speculation=EAGER,
        )
    engine.run()
    engine.close()
    ends = [answer.finished for answer in engine.answers.values() if answer.finished]
    return Answers(
        {name: answer.token_ids for name, answer in engine.answers.items()},
        sum(end.num_draft_tokens for end in ends),
        sum(end.num_accepted_tokens for end in ends),
    )


@pytest.fixture(scope="module")
def plain_at(
    tiny_base: Path, adapter_folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[float], Answers]:
    """Plain decoding's answers at a temperature."""
    path = tmp_path_factory.mktemp("plain")
    return cache(lambda heat: answer_all(LocalEngine(tiny_base, path), adapter_folders, heat))


@pytest.mark.parametrize("temperature", [0.0, 0.7, pytest.param(1.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("proposer", ["ngram", "draft:{base}", "draft:{small}", "early_exit:1"])
def test_the_tokens_are_those_of_plain_decoding(
    tiny_base: Path,
    small_draft: Path,
    adapter_folders: list[Path],
    tmp_path: Path,
    plain_at: Callable[[float], Answers],
    proposer: str,
    temperature: float,
) -> None:
    plain = plain_at(temperature)
    assert plain.num_drafted == 0
    entry = proposer.format(base=tiny_base, small=small_draft)
    engine = LocalEngine(tiny_base, tmp_path, speculation=(entry,), clock=ticking_clock())
    tokens, num_drafted, num_accepted = answer_all(engine, adapter_folders, temperature)
    assert tokens == plain.tokens
    assert num_drafted > num_accepted
    assert num_drafted > 100 or proposer == "ngram"
    assert num_accepted > 0 or proposer in ("ngram", "draft:{small}")
