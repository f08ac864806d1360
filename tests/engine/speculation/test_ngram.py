"""Prompt lookup finds the continuation of the longest match, at a constant cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import Style, held_out_requests
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import GenerationRequest, SpeculationParams
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation import own_texts
from loraplex.engine.speculation.ngram import NgramProposer
from loraplex.engine.speculation.ngram_index import LONGEST, MAX_CANDIDATES, NgramIndex
from loraplex.engine.speculation.own_texts import DRAFTS_PER_TOKEN, MAX_INDEXED_PER_CALL
from loraplex.engine.speculation.proposer import DraftRequest
from loraplex.engine.text.tokenizer import Tokenizer
from support.engine import LocalEngine


def make_request(token_ids: Sequence[int], request_id: str = "r") -> Request:
    submitted = GenerationRequest(request_id, "acme", list(token_ids), SamplingParams())
    namespace = CacheNamespace("acme", "runtime", None)
    return Request(submitted, namespace, seed=0, arrival_time=0.0, adapter_tier=None)


def propose(proposer: NgramProposer, request: Request, num_tokens: int = 4) -> list[int]:
    (draft,) = proposer.propose([DraftRequest(request, num_tokens)])
    assert draft.parents is None
    assert draft.probabilities is None
    return list(draft.token_ids)


def searched(tokens: list[int], num_tokens: int) -> list[int]:
    """What is to be drafted, found by trying every position."""

    def match_len(end: int) -> int:
        lengths = range(1, min(LONGEST, end) + 1)
        return max((n for n in lengths if tokens[end - n : end] == tokens[-n:]), default=0)

    lengths = {end: match_len(end) for end in range(2, len(tokens))}
    pairs = [end for end, length in lengths.items() if length >= 2][-MAX_CANDIDATES:]
    ends = pairs or [end for end, length in lengths.items() if length == 1]
    if not ends:
        return []
    best = max(ends, key=lambda end: (lengths[end], end))
    text = list(tokens)
    for offset in range(min(num_tokens, DRAFTS_PER_TOKEN * lengths[best])):
        text.append(text[best + offset])
    return text[len(tokens) :]


@given(
    parts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=5),
    num_tokens=st.integers(1, 9),
)
def test_it_drafts_what_followed_the_longest_match_however_the_text_grew(
    parts: list[list[int]], num_tokens: int
) -> None:
    proposer, request = NgramProposer(), make_request(parts[0])
    for part in [[], *parts[1:]]:
        request.token_ids += part
        assert propose(proposer, request, num_tokens) == searched(request.token_ids, num_tokens)


def test_of_equally_long_matches_the_latest_counts() -> None:
    request = make_request([1, 2, 7, 9, 1, 2, 8, 9, 5, 1, 2])
    assert propose(NgramProposer(), request) == [8, 9, 5, 1]


def test_a_longer_match_counts_more_than_a_later_one() -> None:
    request = make_request([4, 1, 2, 7, 3, 1, 2, 8, 4, 1, 2])
    assert propose(NgramProposer(), request, 1) == [7]


@pytest.mark.parametrize("num_later", [MAX_CANDIDATES - 1, MAX_CANDIDATES])
def test_a_longer_match_is_found_among_the_latest_candidates_only(num_later: int) -> None:
    later = [token for index in range(num_later) for token in (100 + index, 1, 2)]
    request = make_request([9, 1, 2, 7, *later, 8, 9, 1, 2])
    is_found = num_later < MAX_CANDIDATES
    assert propose(NgramProposer(), request, 1) == [7 if is_found else 8]


def test_an_index_reads_what_is_new_up_to_a_limit() -> None:
    tokens = list(range(10))
    for start, num_unread in ((0, 8), (4, 4), (9, 0)):
        index = NgramIndex(tokens, start=start)
        assert index.num_unread == num_unread
        assert index.extend(3) == len(index) == min(3, num_unread)
        assert index.num_unread == num_unread - len(index)
        assert index.extend(100) == max(num_unread - 3, 0)
        assert (index.extend(1), index.num_unread, len(index)) == (0, 0, num_unread)


def test_a_short_match_is_followed_less_far() -> None:
    followed = [7, 8, 9, 10, 11, 12]
    lengths = [
        len(propose(NgramProposer(), make_request([0, 1, 2, *followed, *end]), 6))
        for end in ([2], [1, 2], [0, 1, 2])
    ]
    assert lengths == [2, 4, 6]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_text_with_a_short_period_is_drafted_as_far_as_is_wanted(period: int) -> None:
    text = [index % period for index in range(40)]
    assert propose(NgramProposer(), make_request(text[:29]), 8) == text[29:37]


@pytest.mark.parametrize("text", [[1], [1, 1], [1, 2, 3, 4]])
def test_without_a_match_nothing_is_drafted(text: list[int]) -> None:
    assert propose(NgramProposer(), make_request(text)) == []


def test_requests_do_not_see_each_others_tokens() -> None:
    proposer = NgramProposer()
    left, right = make_request([1, 2, 7, 1, 2], "left"), make_request([1, 2, 8, 1, 2], "right")
    drafts = proposer.propose([DraftRequest(left, 1), DraftRequest(right, 2)])
    assert [draft.token_ids for draft in drafts] == [(7,), (8, 1)]
    assert propose(proposer, make_request([3, 4, 5, 1, 2], "other")) == []


def test_what_a_request_left_is_gone_once_it_is_forgotten() -> None:
    proposer = NgramProposer()
    propose(proposer, make_request([1, 2, 7, 1, 2]))
    assert proposer.num_indexed_tokens > 0
    proposer.forget("r")
    proposer.forget("unknown")
    assert proposer.num_indexed_tokens == 0
    assert propose(proposer, make_request([3, 4, 1, 2])) == []


class CountedReads(list[int]):
    """Counts the tokens that are read of it."""

    num_reads = 0

    def __getitem__(self, index: SupportsIndex | slice) -> object:  # type: ignore[override]
        found = super().__getitem__(index)
        self.num_reads += len(found) if isinstance(found, list) else 1
        return found


def test_one_call_reads_a_bounded_part_of_long_prompts_and_goes_on_in_the_next() -> None:
    proposer, rng = NgramProposer(), random.Random(0)
    phrase = [rng.randrange(1000) for _ in range(20)]
    text = phrase + [rng.randrange(1000) for _ in range(3 * MAX_INDEXED_PER_CALL)] + phrase[:10]
    requests = [make_request(text, name) for name in ("one", "two")]
    for request in requests:
        request.token_ids = CountedReads(request.token_ids)
    wanted = [DraftRequest(request, 4) for request in requests]
    search = MAX_CANDIDATES * 2 * LONGEST + 10
    before = 0
    for _ in range(8):
        drafts = proposer.propose(wanted)
        num_reads = sum(request.token_ids.num_reads for request in requests)  # type: ignore[attr-defined]
        assert num_reads - before <= 2 * MAX_INDEXED_PER_CALL + len(requests) * search
        before = num_reads
    assert [list(draft.token_ids) for draft in drafts] == [phrase[10:14]] * 2


def test_a_long_prompt_does_not_keep_others_from_being_drafted_for() -> None:
    long = make_request(list(range(4 * MAX_INDEXED_PER_CALL)), "long")
    short = make_request([1, 2, 7, 1, 2], "short")
    drafts = NgramProposer().propose([DraftRequest(long, 1), DraftRequest(short, 1)])
    assert [draft.token_ids for draft in drafts] == [(), (7,)]


def test_a_further_token_costs_the_same_however_long_the_text_is() -> None:
    costs = []
    for length in (100, 4000):
        proposer, rng = NgramProposer(), random.Random(1)
        request = make_request([rng.randrange(50) for _ in range(length)])
        request.token_ids = tokens = CountedReads(request.token_ids)
        propose(proposer, request)
        begin = tokens.num_reads
        for _ in range(50):
            request.token_ids.append(rng.randrange(50))
            propose(proposer, request)
        costs.append(tokens.num_reads - begin)
    assert max(costs) <= 50 * (MAX_CANDIDATES * 2 * LONGEST + 20)
    assert costs[1] <= MAX_CANDIDATES * costs[0]


def test_a_text_beyond_the_window_keeps_its_end_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_texts, "WINDOW", 100)
    proposer, rng = NgramProposer(), random.Random(2)
    request = make_request([rng.randrange(10**6) for _ in range(350)])
    for step in range(300):
        tokens = request.token_ids
        tokens.append(tokens[-50] if step > 100 else rng.randrange(10**6))
        draft_token = propose(proposer, request, 1)
        assert proposer.num_indexed_tokens <= 200
        assert not draft_token or draft_token == [tokens[-50]]
        assert draft_token or step <= 102
    proposer.forget("r")


def test_the_demos_base_repeats_a_question_in_half_the_steps(tmp_path: Path) -> None:
    base = WEIGHTS / "base"
    tokenizer = Tokenizer(base)
    question = max(held_out_requests(), key=lambda request: len(request.prompt))
    engine = LocalEngine(base, tmp_path, dtype="float32", speculation=("ngram",))
    request_id = engine.submit(
        tokenizer.encode_chat([{"role": "user", "content": question.prompt}]),
        speculation=SpeculationParams(num_tokens=8),
        max_tokens=60,
    )
    engine.run()
    engine.close()
    answer = engine.answers[request_id]
    assert tokenizer.decode(answer.token_ids) == question.answer(Style.ECHO)
    assert 2 * len(answer.tokens) <= len(answer.token_ids)
