"""Draft tokens under a grammar: the same tokens as without drafts, and no draft violates it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import SpeculationParams
from loraplex.engine.text.tokenizer import Tokenizer
from support.engine import LocalEngine
from support.grammars import needs_llguidance, random_schema
from support.speculation import (
    ScriptedProposer,
    ScriptedTreeProposer,
    scripted,
    ticking_clock,
)

pytestmark = needs_llguidance

PROMPT = list(range(97, 105))
SCHEMAS = [json.dumps(random_schema(seed)) for seed in range(8)]
Plain = Callable[[float], dict[str, list[int]]]
"""From a temperature to the tokens of plain decoding, by request id."""
EAGER = SpeculationParams(num_tokens=6)


def run(engine: LocalEngine, temperature: float) -> dict[str, list[int]]:
    for number, schema in enumerate(SCHEMAS):
        engine.submit(
            PROMPT,
            request_id=str(number),
            grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, schema),
            max_tokens=200,
            temperature=temperature,
            seed=number,
            speculation=EAGER,
        )
    engine.run()
    engine.close()
    return {name: answer.token_ids for name, answer in engine.answers.items()}


@pytest.fixture(scope="module")
def plain_at(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Plain decoding's answers at a temperature."""
    path = tmp_path_factory.mktemp("plain")
    return cache(lambda temperature: run(LocalEngine(tiny_base, path), temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [ScriptedProposer, ScriptedTreeProposer])
def test_the_tokens_are_those_of_plain_decoding_and_few_drafts_are_wasted(
    tiny_base: Path,
    tmp_path: Path,
    plain_at: Plain,
    kind: type[ScriptedProposer],
    temperature: float,
) -> None:
    plain = plain_at(temperature)
    with scripted(kind(plain, error=0.15)) as name:
        engine = LocalEngine(tiny_base, tmp_path, speculation=(name,), clock=ticking_clock())
    assert run(engine, temperature) == plain
    ends = [answer.end for answer in engine.answers.values()]
    num_drafted = sum(end.num_draft_tokens for end in ends)
    num_accepted = sum(end.num_accepted_tokens for end in ends)
    # Of six draft tokens one is wrong in every draft; what the grammar forbids is not even tried.
    assert num_accepted > 0.6 * num_drafted
    assert num_accepted > 0.4 * sum(map(len, plain.values()))


class FoulProposer(ScriptedProposer):
    """Draft tokens what a grammar has no answer to."""

    name = "foul"

    def __init__(self, draft_tokens: Sequence[int]) -> None:
        super().__init__({str(number): [*draft_tokens] * 40 for number in range(len(SCHEMAS))})


@pytest.mark.parametrize("draft_tokens", [[-1], [256], [256, 123], [10**9], [257, 258, 259], [255]])
def test_foul_drafts_cost_nothing(
    tiny_base: Path, tmp_path: Path, plain_at: Plain, draft_tokens: list[int]
) -> None:
    with scripted(FoulProposer(draft_tokens)) as name:
        engine = LocalEngine(tiny_base, tmp_path, speculation=(name,), clock=ticking_clock())
    assert run(engine, 1.0) == plain_at(1.0)
    assert {answer.end.error for answer in engine.answers.values()} == {None}


def test_an_early_end_among_the_drafts_is_verified_as_one(tiny_base: Path, tmp_path: Path) -> None:
    (letter,) = Tokenizer(tiny_base).encode("a")
    with scripted(ScriptedProposer({"r": [letter, letter, 256, letter]})) as name:
        engine = LocalEngine(tiny_base, tmp_path, speculation=(name,))
    grammar = GrammarSpec(GrammarKind.REGEX, "aa")
    engine.submit(PROMPT, request_id="r", grammar=grammar, max_tokens=9, speculation=EAGER)
    engine.run()
    engine.close()
    answer = engine.answers["r"]
    assert answer.token_ids == [letter, letter, 256]
    assert answer.end.stop_token_id == 256
    # The first token comes of the prompt; of the draft tokens behind it "a" and the end held.
    assert (answer.end.num_draft_tokens, answer.end.num_accepted_tokens) == (2, 2)
