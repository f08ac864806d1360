"""Files of golden sets, and what a mistake in one says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.client.errors import InvalidArgument
from loraplex.api.evaluation.golden_set import GoldenSet, Scorer

CASE = {"id": "a", "prompt": "p", "expected": "e"}


def read(tmp_path: Path, *cases: dict[str, Any] | str) -> GoldenSet:
    file = tmp_path / "golden.jsonl"
    lines = (case if isinstance(case, str) else json.dumps(case) for case in cases)
    file.write_text("\n".join(lines))
    return GoldenSet.read(file)


def case_of(tmp_path: Path, **changes: Any) -> Any:
    changed = {name: value for name, value in {**CASE, **changes}.items() if value is not None}
    return read(tmp_path, changed).cases[0]


@pytest.mark.parametrize(
    ("fields", "scorer"),
    [
        ({}, Scorer.EXACT),
        ({"expected": {"a": 1}}, Scorer.JSON),
        ({"expected": False}, Scorer.JSON),
        ({"expected": "1", "scorer": "json"}, Scorer.JSON),
        ({"expected": None, "schema": True}, Scorer.SCHEMA),
        ({"expected": None, "pattern": ""}, Scorer.PATTERN),
        ({"scorer": "rouge_l"}, Scorer.ROUGE_L),
        ({"expected": None, "scorer": "judge"}, Scorer.JUDGE),
    ],
)
def test_the_scorer_is_the_one_named_or_follows_from_the_fields(
    tmp_path: Path, fields: dict[str, Any], scorer: Scorer
) -> None:
    assert case_of(tmp_path, **fields).scored_by is scorer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expected": None}, "a case needs expected, schema or pattern"),
        ({"id": ""}, "id is empty"),
        ({"prompt": None}, "a case has either messages or prompt"),
        ({"messages": []}, "a case has either messages or prompt"),
        ({"request": {"n": 2, "model": "x"}}, "request cannot set model, n"),
        ({"slices": ["all"]}, "slices have to differ"),
        ({"slices": ["x", "x"]}, "slices have to differ"),
        ({"scorer": "exact", "expected": 1}, "the scorer exact needs an expected text"),
        ({"scorer": "judge", "expected": 1}, "the expected answer for the scorer judge is a text"),
        ({"scorer": "exact", "schema": True}, "the scorer exact takes no schema"),
        ({"scorer": "exact", "pattern": "x"}, "the scorer exact takes no pattern"),
        ({"scorer": "embedding", "expected": " "}, "needs an expected text that is not empty"),
        ({"scorer": "schema"}, "the scorer schema needs a schema"),
        ({"scorer": "pattern"}, "the scorer pattern needs a pattern"),
        ({"pattern": "(?=x)"}, "invalid pattern '(?=x)'"),
        ({"pattern": "(a{1000}){1000}"}, "invalid pattern"),
        ({"schema": {"type": "text"}}, "invalid schema"),
        ({"schema": {"$ref": "http://127.0.0.1:1/schema"}}, "invalid schema"),
        ({"scorer": "magic"}, "Invalid enum value 'magic'"),
        ({"expcted": "e"}, "unknown field `expcted`"),
    ],
)
def test_a_wrong_case_is_told_with_its_line(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    changed = {name: value for name, value in {**CASE, **fields}.items() if value is not None}
    with pytest.raises(InvalidArgument) as refused:
        read(tmp_path, {**CASE, "id": "first"}, "", changed)
    assert "golden.jsonl, line 3: " in str(refused.value)
    assert message in str(refused.value)


def test_a_set_is_refused_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="line 2: the id 'a' is not unique"):
        read(tmp_path, CASE, CASE)
    chat = {"id": "b", "messages": [{"role": "user", "content": "p"}], "expected": "e"}
    with pytest.raises(InvalidArgument, match="line 2: the cases of a set all have messages"):
        read(tmp_path, CASE, chat)
    with pytest.raises(InvalidArgument, match="has no cases"):
        read(tmp_path, "", " ")
    with pytest.raises(InvalidArgument, match="line 1: Input data was truncated"):
        read(tmp_path, "{")


def test_slices_list_their_cases_after_all(tmp_path: Path) -> None:
    golden_set = read(
        tmp_path,
        {**CASE, "slices": ["short", "de"]},
        {**CASE, "id": "b"},
        {**CASE, "id": "c", "slices": ["de"]},
    )
    assert list(golden_set.slices.items()) == [("all", [0, 1, 2]), ("de", [0, 2]), ("short", [0])]


def test_an_answer_follows_a_pattern_or_schema(tmp_path: Path) -> None:
    pattern = case_of(tmp_path, expected=None, pattern=r"^\d{3}-x$").constraint()
    assert (pattern("123-x"), pattern("123-xy"), pattern("١٢٣-x")) == (True, False, False)
    schema = {"type": "object", "properties": {"a": {"pattern": "^b+$"}}, "required": ["a"]}
    follows = case_of(tmp_path, expected=None, schema=schema).constraint()
    assert follows('{"a": "bb"}')
    assert not any(map(follows, ('{"a": "c"}', "{}", "no JSON", "")))


def test_a_hostile_pattern_takes_linear_time(tmp_path: Path) -> None:
    pattern = case_of(tmp_path, expected=None, pattern="^(a+)+$").constraint()
    assert not pattern("a" * 100_000 + "b"), "a backtracking engine would not return"


def test_schemas_name_the_extra_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema_rs", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'loraplex\[eval\]'"):
        case_of(tmp_path, expected=None, pattern="x")
    assert case_of(tmp_path).scored_by is Scorer.EXACT
