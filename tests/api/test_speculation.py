"""The `speculation` parameter, and its results in `usage`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import pytest

from loraplex.api.cli.pins import details
from loraplex.api.routes.adapter_views import proposer_view
from loraplex.api.schemas.completions import CompletionBody
from loraplex.engine.messages import SpeculationParams, SpeculationStats
from loraplex.engine.text.tokenizer import Tokenizer
from support.envelopes import check_envelope
from support.server import Caller
from support.waiting import wait_for

NUM_TOKENS = 32
DRAFT_FOUR = {"proposer": "ngram", "num_tokens": 4}


@pytest.mark.parametrize(
    ("asked", "params"),
    [
        ({}, None),
        ({"speculation": None}, None),
        ({"speculation": "auto"}, None),
        ({"speculation": {}}, None),
        ({"speculation": "off"}, SpeculationParams(num_tokens=0)),
        ({"speculation": {"num_tokens": 0}}, SpeculationParams(num_tokens=0)),
        ({"speculation": {"proposer": "ngram"}}, SpeculationParams("ngram")),
        ({"speculation": DRAFT_FOUR}, SpeculationParams("ngram", 4)),
    ],
)
def test_the_field_says_what_the_engine_is_told(
    asked: dict[str, Any], params: SpeculationParams | None
) -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", **asked})
    assert body.speculation_params == params


@pytest.fixture(scope="module")
def one_token(tiny_base: Any) -> dict[str, int]:
    """A bias that makes every answer the same letter over and over."""
    (token_id,) = Tokenizer(tiny_base).encode("Q")
    return {str(token_id): 100}


def ask(caller: Caller, speculation: object, bias: dict[str, int], **options: Any) -> Any:
    return caller.openai.chat.completions.create(
        model="bot",
        messages=[{"role": "user", "content": "Say Q"}],
        max_tokens=NUM_TOKENS,
        logit_bias=bias,
        extra_body={"speculation": speculation},
        **options,
    )


def test_drafting_changes_the_usages_details_and_nothing_else(
    resident: Caller, one_token: dict[str, int]
) -> None:
    plain, drafted = (
        ask(resident, speculation, one_token, logprobs=True, top_logprobs=2)
        for speculation in ("off", DRAFT_FOUR)
    )
    assert drafted.choices[0].message == plain.choices[0].message
    spelled, expected = (
        [entry.token for entry in answer.choices[0].logprobs.content] for answer in (drafted, plain)
    )
    assert spelled == expected == ["Q"] * NUM_TOKENS
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens == NUM_TOKENS
    details_of_plain = plain.usage.completion_tokens_details
    assert details_of_plain.accepted_prediction_tokens == 0
    assert details_of_plain.rejected_prediction_tokens == 0
    assert 0 < drafted.usage.completion_tokens_details.accepted_prediction_tokens < NUM_TOKENS


def test_a_stream_counts_as_the_whole_answer_and_choices_are_summed(
    resident: Caller, one_token: dict[str, int]
) -> None:
    usage = ask(resident, DRAFT_FOUR, one_token, n=2).usage
    *chunks, last = ask(
        resident, DRAFT_FOUR, one_token, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Q" * NUM_TOKENS] * 2
    assert len(chunks) < 2 * NUM_TOKENS  # several letters came together
    assert last.usage.completion_tokens == usage.completion_tokens == 2 * NUM_TOKENS
    alone = ask(resident, DRAFT_FOUR, one_token).usage.completion_tokens_details
    for counted in (usage, last.usage):
        accepted = counted.completion_tokens_details.accepted_prediction_tokens
        assert accepted > alone.accepted_prediction_tokens > 0


def test_what_is_behind_a_stop_string_is_not_paid(
    resident: Caller, one_token: dict[str, int]
) -> None:
    for speculation in ("off", {"num_tokens": 7}):
        answer = ask(resident, speculation, one_token, stop=["Q" * 11])
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 11
        details_of_usage = answer.usage.completion_tokens_details
        assert details_of_usage.accepted_prediction_tokens < 11


def test_a_proposer_that_is_not_served_is_refused_with_those_that_are(caller: Caller) -> None:
    body = {"model": "tiny", "prompt": "x", "speculation": {"proposer": "medusa"}}
    answer = caller.http.post("/v1/completions", json=body)
    error = check_envelope(answer, "proposer_not_served", "speculation.proposer")
    assert "medusa" in error["message"]
    assert "ngram" in error["message"]


def test_the_base_tells_who_drafts(caller: Caller) -> None:
    told = caller.http.get("/v1/base").json()["speculation"]
    assert told == {"proposers": ["ngram"], "max_draft_tokens": 8, "acceptance": "coupled"}


def test_readiness_and_metrics_tell_what_came_of_drafting(
    resident: Caller, one_token: dict[str, int]
) -> None:
    usage = ask(resident, DRAFT_FOUR, one_token).usage
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    (told,) = resident.http.get("/v1/adapters/bot/versions/1/readiness").json()["speculation"]
    assert told["proposer"] == "ngram"
    assert told["draft_tokens"] >= told["accepted_tokens"] >= accepted
    assert told["draft_tokens"] >= told["drafts"] > 0

    def is_counted() -> bool:
        found = re.search(
            r'^loraplex_speculation_accepted_tokens_total{proposer="ngram"} (\S+)$',
            resident.http.get(f"{resident.url}/metrics").text,
            re.MULTILINE,
        )
        return found is not None and float(found[1]) >= accepted

    wait_for(is_counted)


def test_why_tells_whether_drafting_pays() -> None:
    def told(num_tokens: int) -> list[str]:
        stats = SpeculationStats(None, "ngram", 10, 40, 25, 0.625, num_tokens)
        view = proposer_view(stats)
        return list(details({"load": None, "speculation": [asdict(view)]}, []))

    assert told(4) == ["ngram  25 of 40 draft tokens accepted, lately 62%: 4 draft tokens per step"]
    assert told(0) == ["ngram  25 of 40 draft tokens accepted, lately 62%: off"]
