"""The event of each request's next tokens, in steps whose requests ask for different things."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.draft import Draft
from loraplex.engine.execution.execution import Drawn
from loraplex.engine.execution.grammars import Grammars
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest, TokensGenerated
from loraplex.engine.next_tokens import NextTokens
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.acceptors import CoupledAcceptor
from support.step_output import output_of

VOCAB_SIZE = 8


def make_request(
    *, num_logprobs: int | None = None, return_logits: bool = False, draft: Draft | None = None
) -> Request:
    sampling = SamplingParams(temperature=0.0, num_logprobs=num_logprobs)
    submitted = GenerationRequest("r", "acme", [0], sampling, return_logits=return_logits)
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 0, 0.0, None)
    request.draft = draft or request.draft
    return request


def rows_preferring(*tokens: int) -> Tensor:
    """Each row's likeliest token, the one after it the next likely, and so on."""
    order = (torch.arange(VOCAB_SIZE) - torch.tensor(tokens)[:, None]) % VOCAB_SIZE
    return -order.float() * (1 + torch.arange(len(tokens))[:, None])


def draw(requests: list[Request], logits: Tensor) -> list[TokensGenerated]:
    tokens = NextTokens(CoupledAcceptor(), Grammars(None))
    drawn = tokens.draw(requests, output_of(logits), range(len(logits))).read()
    events = []
    for result in drawn:
        assert isinstance(result, Drawn)
        events.append(result.generated)
    return events


def test_each_request_gets_as_many_logprobs_as_it_asks_for() -> None:
    tree = Draft((5, 2, 3), (-1, -1, 1))
    requests = [
        make_request(num_logprobs=0),
        make_request(num_logprobs=1, draft=tree),
        make_request(),
        make_request(num_logprobs=3),
    ]
    logits = rows_preferring(1, 2, 7, 3, 4, 6, 0)
    events = draw(requests, logits)
    assert [event.token_ids for event in events] == [[1], [2, 3, 4], [6], [0]]
    assert [event.num_draft_tokens for event in events] == [0, 3, 0, 0]
    assert events[2].logprobs is None
    expected = logits.log_softmax(-1)
    for event, rows, number in (
        (events[0], [0], 0),
        (events[1], [1, 3, 4], 1),
        (events[3], [6], 3),
    ):
        assert event.logprobs is not None
        for entry, token, row in zip(event.logprobs, event.token_ids, rows, strict=True):
            assert entry.chosen.token_id == token
            assert entry.chosen.logprob == expected[row, token].item()
            top = [(token + place) % VOCAB_SIZE for place in range(number)]
            assert [alternative.token_id for alternative in entry.top] == top


def test_logits_come_with_the_first_token_only_and_are_those_behind_the_prompt() -> None:
    drafting = make_request(draft=Draft((1, 2)))
    asking, later = (make_request(return_logits=True) for _ in range(2))
    later.token_ids.append(3)
    logits = rows_preferring(1, 2, 3, 4, 5)
    events = draw([drafting, asking, later], logits)
    assert [event.logits is not None for event in events] == [False, True, False]
    assert events[1].logits is not None
    assert np.frombuffer(events[1].logits, np.float32).tolist() == logits[3].tolist()
