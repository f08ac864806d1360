"""The output of an untrained model with a grammar follows the grammar."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import ErrorInfo, FinishReason
from loraplex.engine.text.tokenizer import Tokenizer
from support.chi_square import p_value
from support.engine import Answer, LocalEngine
from support.grammars import needs_llguidance, random_schema

pytestmark = needs_llguidance

NUM_SCHEMAS = 100
PROMPT = list(range(20, 40))
EXPRESSION = 'start: sum\nsum: term ("+" term){0,3}\nterm: /[1-9][0-9]{0,2}/ | "(" sum ")"'


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[LocalEngine]:
    folder = tmp_path_factory.mktemp("engine")
    engine = LocalEngine(tiny_base, folder, max_model_len=512, async_scheduling=request.param)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


def spec(kind: GrammarKind, text: str = "") -> GrammarSpec:
    return GrammarSpec(kind, text)


def answer(engine: LocalEngine, grammar: GrammarSpec, **sampling: Any) -> Answer:
    request_id = engine.submit(PROMPT, grammar=grammar, **{"max_tokens": 400, **sampling})
    engine.run()
    return engine.answers[request_id]


def text_of(tokenizer: Tokenizer, answer: Answer) -> str:
    assert answer.end.reason is FinishReason.STOP, answer.end
    assert answer.end.stop_token_id == answer.token_ids[-1]
    return b"".join(map(tokenizer.token_bytes, answer.token_ids[:-1])).decode()


def test_every_output_under_a_schema_is_json_that_it_describes(
    engine: LocalEngine, tokenizer: Tokenizer
) -> None:
    import jsonschema  # here: where there are no grammars it may be missing

    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    ids = [
        engine.submit(
            PROMPT,
            grammar=spec(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            max_tokens=480,
            temperature=0.0 if number % 4 == 0 else 1.5,
            seed=number,
        )
        for number, schema in enumerate(schemas)
    ]
    engine.run()
    for schema, request_id in zip(schemas, ids, strict=True):
        value = json.loads(text_of(tokenizer, engine.answers[request_id]))
        jsonschema.validate(
            value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )


def is_expression(text: str) -> bool:
    return isinstance(ast.parse(text, mode="eval").body, ast.BinOp | ast.Constant)


@pytest.mark.parametrize(
    ("grammar", "follows"),
    [
        (spec(GrammarKind.REGEX, r"[a-z]{2,9}@(foo|bar)\.com"), r"[a-z]{2,9}@(foo|bar)\.com"),
        (spec(GrammarKind.REGEX, "/[0-9]+"), "/[0-9]+"),
        (spec(GrammarKind.REGEX, "ü{3}"), "ü{3}"),
        (spec(GrammarKind.CHOICE, '["yes", "no"]'), "yes|no"),
        (spec(GrammarKind.CHOICE, '["ab", "abc", "a.b"]'), r"ab|abc|a\.b"),
        (spec(GrammarKind.CHOICE, r'["<|end|>", "\n-\"\\ 🦙"]'), r'<\|end\|>|\n-"\\ 🦙'),
        (spec(GrammarKind.LARK, EXPRESSION), is_expression),
    ],
    ids=lambda value: getattr(value, "text", getattr(value, "__name__", str(value))),
)
def test_every_output_follows_its_grammar(
    engine: LocalEngine,
    tokenizer: Tokenizer,
    grammar: GrammarSpec,
    follows: str | Callable[[str], bool],
) -> None:
    ids = [
        engine.submit(PROMPT, grammar=grammar, temperature=1.0, seed=seed, max_tokens=300)
        for seed in range(8)
    ]
    engine.run()
    texts = [text_of(tokenizer, engine.answers[request_id]) for request_id in ids]
    for text in texts:
        assert re.fullmatch(follows, text) if isinstance(follows, str) else follows(text), text
    assert len(set(texts)) > 1 or grammar.text == "ü{3}"


def test_any_object_is_a_json_object(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    ids = [
        engine.submit(
            PROMPT,
            grammar=spec(GrammarKind.JSON_OBJECT),
            temperature=1.0,
            seed=seed,
            logit_bias={tokenizer.encode('"')[0]: 6.0, tokenizer.encode("}")[0]: 6.0},
            max_tokens=480,
        )
        for seed in range(8)
    ]
    engine.run()
    texts = [text_of(tokenizer, engine.answers[request_id]) for request_id in ids]
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert len(set(texts)) > 1


def test_draws_are_the_models_own_under_the_condition_of_the_grammar(
    engine: LocalEngine, tokenizer: Tokenizer
) -> None:
    allowed = [tokenizer.encode(letter)[0] for letter in "abcdefgh"]
    first = engine.submit(PROMPT, max_tokens=1, return_logits=True)
    engine.run()
    raw = engine.answers[first].tokens[0].logits
    assert raw is not None
    logits = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    grammar = spec(GrammarKind.REGEX, "[a-h]+")
    ids = [
        engine.submit(PROMPT, grammar=grammar, max_tokens=1, temperature=2.0, seed=seed)
        for seed in range(1000)
    ]
    engine.run()
    cells = [allowed.index(engine.answers[it].token_ids[0]) for it in ids]
    assert p_value(torch.tensor(cells), (logits[allowed] / 2.0).softmax(-1)) > 1e-5


def test_logprobs_are_the_models_own_whatever_the_grammar_forbids(
    engine: LocalEngine, tokenizer: Tokenizer
) -> None:
    first = engine.submit(PROMPT, max_tokens=1, return_logits=True)
    engine.run()
    raw = engine.answers[first].tokens[0].logits
    assert raw is not None
    expected = torch.frombuffer(bytearray(raw), dtype=torch.float32).log_softmax(-1)
    result = answer(engine, spec(GrammarKind.REGEX, "q"), num_logprobs=5)
    (token, *_), (entry, *_) = result.token_ids, result.logprobs
    assert tokenizer.token_bytes(token) == b"q"
    assert entry.chosen.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert [top.token_id for top in entry.top] == expected.topk(5).indices.tolist()


def test_who_ignores_the_end_goes_on_as_long_as_the_grammar_does(
    engine: LocalEngine, tokenizer: Tokenizer
) -> None:
    end = tokenizer.encode("<|end|>")[0]
    forced: dict[str, Any] = {"logit_bias": {end: 100.0}, "max_tokens": 20}
    open_ended, bounded = spec(GrammarKind.REGEX, "[ab]+"), spec(GrammarKind.REGEX, "[ab]{1,5}")
    assert len(answer(engine, open_ended, **forced).token_ids) == 2
    ignoring = answer(engine, open_ended, ignore_eos=True, **forced)
    assert ignoring.end.reason is FinishReason.LENGTH
    assert len(ignoring.token_ids) == 20
    assert len(text_of(tokenizer, answer(engine, bounded, ignore_eos=True, **forced))) == 5


def test_a_stop_token_ends_an_output_before_its_grammar_does(
    engine: LocalEngine, tokenizer: Tokenizer
) -> None:
    stop = tokenizer.encode("c")[0]
    result = answer(engine, spec(GrammarKind.REGEX, "abcabc"), stop_token_ids=(stop,))
    assert text_of(tokenizer, result) == "ab"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (spec(GrammarKind.REGEX, "(a"), "unclosed group"),
        (spec(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (spec(GrammarKind.LARK, "start: missing"), "unknown name"),
        (spec(GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}'), "not"),
        (spec(GrammarKind.JSON_SCHEMA, '{"$ref": "http://localhost/x"}'), "http://localhost/x"),
        (spec(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'), "no output can follow it"),
        (spec(GrammarKind.JSON_SCHEMA, '{"type": "string"'), "JSON"),
    ],
    ids=str,
)
def test_a_grammar_that_nothing_can_follow_is_refused_in_words(
    engine: LocalEngine, grammar: GrammarSpec, words: str
) -> None:
    error = answer(engine, grammar).end.error
    assert isinstance(error, ErrorInfo)
    assert error.code == "invalid_grammar"
    assert words in error.message
