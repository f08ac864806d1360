"""Every row of the table in `docs/anthropic.md`, sent to the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.schemas.anthropic_messages import CountTokensBody, MessagesBody
from loraplex.api.schemas.generation import SamplingBody
from support.envelopes import check_envelope
from support.server import Caller

PAGE = Path(__file__).parents[2] / "docs" / "anthropic.md"
ROWS: list[tuple[dict[str, Any], str]] = [
    (json.loads(match[1]), match[2])
    for line in PAGE.read_text().splitlines()
    if (match := re.fullmatch(r"\| `(\{.*\})` \| (yes|ignored|no) \|", line))
]
ASK: dict[str, Any] = {
    "model": "bot",
    "temperature": 0,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
}
PROMISED = {next(iter(sent)) for sent, _ in ROWS}


@pytest.mark.parametrize(("sent", "promised"), ROWS, ids=lambda value: json.dumps(value)[:50])
def test_the_table_is_true(resident: Caller, sent: dict[str, Any], promised: str) -> None:
    answer = resident.http.post("/v1/messages", json={**ASK, **sent})
    if promised == "no":
        error = answer.json()["error"]
        check_envelope(answer, "unsupported_parameter", error["param"])
        assert error["param"].split(".")[0] in sent
        return
    if "grammar_not_served" in answer.text:
        pytest.importorskip("llguidance", reason="grammars need llguidance")
    assert answer.is_success, answer.text
    if promised == "ignored":
        plain = resident.http.post("/v1/messages", json=ASK)
        assert answer.json()["content"] == plain.json()["content"]


def test_every_field_of_the_client_and_of_ours_is_in_the_table() -> None:
    pytest.importorskip("anthropic", reason="has the fields")
    from anthropic.types import message_count_tokens_params, message_create_params

    for params in (
        message_create_params.MessageCreateParamsBase,
        message_count_tokens_params.MessageCountTokensParams,
    ):
        assert set(params.__annotations__) - PROMISED == set()
    for body in (MessagesBody, CountTokensBody):
        assert set(body.model_fields) - set(SamplingBody.model_fields) - PROMISED == set()
        assert set(body.tolerated) - SamplingBody.tolerated - PROMISED == set()


def test_a_page_that_lists_nothing_would_be_noticed() -> None:
    assert {"yes", "ignored", "no"} == {promised for _, promised in ROWS}
