"""Accepted draft tokens arrive several at a time; apart from the timing, nothing differs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.formats.completions import CompletionFormat
from loraplex.api.inference.order import Order
from loraplex.api.inference.served_models import ServedModel
from loraplex.engine.messages import FinishReason, TokenLogprob, TokenLogprobs, TokensGenerated
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.tokenizer import Tokenizer
from support.scripted_generation import PROMPT, Event, Scenario, finished, run, started

LETTERS = "abc\u00e9"
"""Five bytes, each a token: the last two are one character only together."""
LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Said(NamedTuple):
    """All that a caller is told by a stream, and pays for."""

    text: str
    finish_reason: str | None
    logprobs: list[list[Any]]
    num_completion_tokens: int


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


@given(
    letters=st.lists(st.integers(0, 4), min_size=1, max_size=16),
    has_end=st.booleans(),
    cuts=st.sets(st.integers(1, 16)),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3).map(tuple),
)
def test_how_tokens_are_bundled_changes_nothing_that_a_caller_sees(
    tokenizer: Tokenizer, letters: list[int], has_end: bool, cuts: set[int], stop: tuple[str, ...]
) -> None:
    alphabet, (end,) = tokenizer.encode(LETTERS), tokenizer.encode("z")
    token_ids = [*(alphabet[letter] for letter in letters), *([end] if has_end else [])]
    everywhere = set(range(1, len(token_ids)))
    one_by_one = listen(tokenizer, token_ids, everywhere, stop=stop, end=end)
    assert listen(tokenizer, token_ids, cuts & everywhere, stop=stop, end=end) == one_by_one


def listen(
    tokenizer: Tokenizer, token_ids: list[int], cuts: set[int], *, stop: tuple[str, ...], end: int
) -> Said:
    """What a stream says of these tokens if they come in events that end at `cuts`."""
    sampling = SamplingParams(num_logprobs=1, stop_token_ids=(end,))
    reason = FinishReason.STOP if token_ids[-1] == end else FinishReason.LENGTH
    events: list[Event] = [started(), *bundles(token_ids, cuts), finished(reason)]
    scenario = Scenario(tokenizer, events, stop=stop, num_logprobs=1, stop_token_ids=(end,))
    order = SimpleNamespace(
        request_id="r",
        model=ServedModel("m", None),
        sampling=sampling,
        prompts=[PROMPT],
        num_choices=1,
    )
    form = CompletionFormat(cast(Order, order), tokenizer, streams_usage=False)

    chunks = [chunk for delta in run(scenario.deltas()) for chunk in form.chunks(delta)]
    choices = [chunk.choices[0] for chunk in chunks]
    parts = [choice.logprobs for choice in choices if choice.logprobs]
    return Said(
        text="".join(choice.text for choice in choices),
        finish_reason=choices[-1].finish_reason,
        logprobs=[[entry for part in parts for entry in getattr(part, name)] for name in LOGPROBS],
        num_completion_tokens=scenario.outcomes[0].counts.num_completion_tokens,
    )


def bundles(token_ids: list[int], cuts: set[int]) -> Iterator[TokensGenerated]:
    for start, end in pairwise([0, *sorted(cuts), len(token_ids)]):
        logprobs = [
            TokenLogprobs(TokenLogprob(token, -1.0), [TokenLogprob(token + 1, -0.5)])
            for token in token_ids[start:end]
        ]
        yield TokensGenerated("r", token_ids[start:end], logprobs)
