"""Events assembled from their parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.api.formats.answering import PlainEvents
from loraplex.api.formats.chat import ChatFormat
from loraplex.api.formats.completions import CompletionFormat
from loraplex.api.http.text_events import TextEvents
from loraplex.api.inference.order import Order
from loraplex.api.inference.sequence_text import Delta
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.tools.answer_plan import AnswerPlan
from loraplex.engine.messages import TokenLogprob, TokenLogprobs
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer

TEXTS = [
    "a",
    " b",
    '"',
    "\\",
    "\n\n",
    "\0text\0",
    "data: [DONE]",
    "é€😀",
    "\u2028\u2029\u0085\x7f",
    "{}%b",
    "</script>",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


def forms(
    tokenizer: Tokenizer, *, streams_usage: bool, num_logprobs: int | None
) -> list[PlainEvents]:
    order = cast(
        Order,
        SimpleNamespace(
            request_id="r",
            model=ServedModel('m"\\ text', None),
            sampling=SamplingParams(num_logprobs=num_logprobs),
            prompts=[[1]],
            num_choices=2,
        ),
    )
    return [
        CompletionFormat(order, tokenizer, streams_usage=streams_usage),
        ChatFormat(order, AnswerPlan(None), tokenizer, streams_usage=streams_usage),
    ]


@pytest.mark.parametrize("streams_usage", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_an_event_of_text_is_what_its_chunk_is_as_json(
    tokenizer: Tokenizer, number: int, streams_usage: bool
) -> None:
    form = forms(tokenizer, streams_usage=streams_usage, num_logprobs=None)[number]
    for index in (0, 1):
        for text in TEXTS:
            delta = Delta(index, text, [])
            (chunk,) = form.chunks(delta)
            event = form.events(delta)
            assert event == form.event(chunk)
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            assert choice["index"] == index
            assert choice.get("text", choice.get("delta", {}).get("content")) == text


@pytest.mark.parametrize("number", [0, 1])
def test_what_says_more_than_text_says_it_all(tokenizer: Tokenizer, number: int) -> None:
    entry = TokenLogprobs(TokenLogprob(70, -1.0), [])
    form, twin = (forms(tokenizer, streams_usage=False, num_logprobs=0)[number] for _ in range(2))
    deltas = [
        Delta(0, "a", [entry]),
        Delta(0, "", [entry]),
        Delta(0, "", []),
        Delta(1, "b", [], "stop"),
    ]
    for delta in deltas:
        assert form.events(delta) == b"".join(map(twin.event, twin.chunks(delta)))
    form = forms(tokenizer, streams_usage=False, num_logprobs=None)[number]
    ending = json.loads(form.events(Delta(1, "b", [], "stop")).split(b"data: ")[-1])
    assert ending["choices"][0]["finish_reason"] == "stop"


def test_an_event_without_a_place_for_its_text_is_refused() -> None:
    make: Any
    for make in (lambda text: b"{}", lambda text: json.dumps([text, text]).encode()):
        with pytest.raises(ValueError, match="values to unpack"):
            TextEvents(make)
