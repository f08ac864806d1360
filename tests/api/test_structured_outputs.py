"""Structured outputs through the unmodified openai client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from support.envelopes import check_envelope
from support.server import Caller

pytest.importorskip("llguidance", reason="grammars need llguidance")
jsonschema = pytest.importorskip("jsonschema")

HELLO: Any = [{"role": "user", "content": "Hello there"}]
CHAT: dict[str, Any] = {"model": "bot", "messages": HELLO, "max_tokens": 300}
PLAIN: dict[str, Any] = {"model": "bot", "prompt": "Hello", "max_tokens": 300}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/yes"}, {"type": "null"}]},
    },
    "required": ["color", "sizes", "next"],
    "additionalProperties": False,
    "$defs": {"yes": {"type": "boolean"}},
}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


class Item(BaseModel):
    color: Literal["red", "blue"]
    is_new: bool


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_follows_its_schema(resident: Caller, seed: int) -> None:
    answer = resident.openai.chat.completions.create(
        **CHAT, response_format=JSON_SCHEMA, seed=seed, n=2
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_the_client_parses_answers_into_models(resident: Caller) -> None:
    client = resident.openai
    answer = client.chat.completions.parse(**CHAT, response_format=Item, seed=4)
    assert isinstance(answer.choices[0].message.parsed, Item)
    with client.chat.completions.stream(**CHAT, response_format=Item, seed=4) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    response = client.responses.parse(
        model="bot", input="Hello there", text_format=Item, max_output_tokens=300,
        extra_body={"seed": 4},
    )  # fmt: skip
    assert response.output_parsed == answer.choices[0].message.parsed


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["yes", "no.", "per haps"]}}, r"yes|no\.|per haps"),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]+!"}}, r"[a-c]{3}-[0-9]+!"),
    ({"structured_outputs": {"grammar": 'start: "x" ("yz")~2 "."'}}, r"xyzyz\."),
    ({"structured_outputs": {"json": {"enum": [1, "a"]}}}, r'1|"a"'),
    ({"structured_outputs": {"json": '{"enum": [1, "a"]}'}}, r'1|"a"'),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_vllms_structured_outputs_are_followed(
    resident: Caller, form: dict[str, Any], pattern: str
) -> None:
    client = resident.openai
    chat = client.chat.completions.create(**CHAT, extra_body=form)
    plain = client.completions.create(**PLAIN, extra_body=form)
    response = client.responses.create(
        model="bot", input="Hello", max_output_tokens=300, extra_body=form
    )
    for text in (chat.choices[0].message.content, plain.choices[0].text, response.output_text):
        assert re.fullmatch(pattern, text or "")


@pytest.mark.parametrize(
    "form",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_any_object_is_an_object_as_far_as_it_comes(resident: Caller, form: dict[str, Any]) -> None:
    answer = resident.openai.chat.completions.create(**CHAT, seed=3, extra_body=form)
    choice = answer.choices[0]
    text = choice.message.content or ""
    assert text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


INVALID: list[tuple[dict[str, Any], str, str | None]] = [
    ({"structured_outputs": {}}, "invalid_parameter", "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "invalid_parameter",
        "structured_outputs",
    ),
    ({"structured_outputs": {"choice": []}}, "invalid_parameter", "structured_outputs.choice"),
    (
        {"response_format": {"type": "json_schema"}},
        "invalid_parameter",
        "response_format.json_schema",
    ),
    (
        {"response_format": JSON_SCHEMA, "structured_outputs": {"regex": "a"}},
        "invalid_parameter",
        "structured_outputs",
    ),
]


@pytest.mark.parametrize(("form", "code", "param"), INVALID)
def test_a_form_that_is_none_is_refused(
    resident: Caller, form: dict[str, Any], code: str, param: str | None
) -> None:
    check_envelope(resident.http.post("/v1/chat/completions", json={**CHAT, **form}), code, param)


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "begin: 'x'"}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"regex": "a" * ((64 << 10) + 1)}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "it", "schema": {"type": "colour"}},
            }
        },
    ],
)
def test_a_grammar_that_cannot_be_followed_is_the_callers_error(
    resident: Caller, form: dict[str, Any]
) -> None:
    answer = resident.http.post("/v1/chat/completions", json={**CHAT, **form})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_grammar"
    if "bytes are more than" not in error["message"]:
        assert error["param"] == next(iter(form))


def test_text_asks_for_nothing(resident: Caller) -> None:
    ask: dict[str, Any] = {**CHAT, "max_tokens": 8, "seed": 3}
    client = resident.openai
    asked = client.chat.completions.create(**ask, response_format={"type": "text"})
    assert asked.choices[0].message == client.chat.completions.create(**ask).choices[0].message
