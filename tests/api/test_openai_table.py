"""Every row of the table in `docs/openai.md`, sent to the server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from loraplex.api.contract.request_model import RequestModel
from loraplex.api.schemas.chat import ChatBody
from loraplex.api.schemas.completions import CompletionBody
from loraplex.api.schemas.responses import ResponsesBody
from support.envelopes import check_envelope
from support.server import Caller

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    ),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
}
BODIES: dict[str, type[RequestModel]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": ResponsesBody,
}
ALWAYS = {"model": "bot", "temperature": 0}
OWN_IDENTITY = {"id", "created", "created_at", "usage"}


class Row(NamedTuple):
    sent: dict[str, Any]
    route: str
    promised: str

    @property
    def field(self) -> str:
        return next(iter(self.sent))


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| `(\{.*\})` \| (\w+) \| (\w+) \| (\w+) \|", line):
            for route, promised in zip(ROUTES, match.groups()[1:], strict=True):
                yield Row(json.loads(match[1]), route, promised)


ROWS = list(rows())


def named(row: Row) -> str:
    return f"{row.route}-{json.dumps(row.sent)[:50]}"


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_the_table_is_true(resident: Caller, row: Row) -> None:
    path, base = ROUTES[row.route]
    body = {**ALWAYS, **base, **row.sent}
    if row.field == "previous_response_id" and row.promised == "yes":
        stored = resident.http.post(path, json={**ALWAYS, **base, "store": True})
        body["previous_response_id"] = stored.json()["id"]
    answer = resident.http.post(path, json=body)
    match row.promised:
        case "yes":
            if "grammar_not_served" in answer.text:
                pytest.importorskip("llguidance", reason="grammars need llguidance")
            assert answer.is_success, answer.text
        case "ignored":
            assert answer.is_success, answer.text
            if not row.sent.get("stream"):
                plain = resident.http.post(path, json={**ALWAYS, **base})
                assert _said(answer.json()) == _said(plain.json())
        case "no":
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"].split(".")[0] in row.sent
            if error["code"] != "invalid_parameter":  # a value of the wrong kind for this route
                check_envelope(answer, "unsupported_parameter", error["param"])
        case other:
            pytest.fail(f"{other} is no promise")


def test_every_field_of_the_client_and_of_ours_is_in_the_table() -> None:
    told = {row.field for row in ROWS}
    for params in (
        chat_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsBase,
        response_create_params.ResponseCreateParamsBase,
    ):
        assert set(params.__annotations__) - told == set()
    for body in BODIES.values():
        assert set(body.model_fields) - told == set()
        assert set(body.tolerated) - told == set()


def test_what_a_route_serves_is_promised_for_that_route() -> None:
    for route, body in BODIES.items():
        served = {row.field for row in ROWS if row.route == route and row.promised == "yes"}
        assert served == set(body.model_fields)


def _said(answer: dict[str, Any]) -> Any:
    """An answer without what differs between any two."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in OWN_IDENTITY}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(answer)
