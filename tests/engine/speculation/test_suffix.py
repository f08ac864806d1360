"""The suffix proposer drafts what most often followed the longest match, of this adapter alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.messages import (
    DeleteAdapter,
    ForgetOutputs,
    GenerationRequest,
    SpeculationParams,
)
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.speculation.ngram_index import LONGEST
from loraplex.engine.speculation.own_texts import DRAFTS_PER_TOKEN
from loraplex.engine.speculation.proposer import DraftRequest
from loraplex.engine.speculation.remembered_outputs import MAX_AGE_SECONDS
from loraplex.engine.speculation.suffix import SuffixProposer
from support.engine import LocalEngine
from support.marks import marked_slow

KEY, OTHER = AdapterKey("acme", "sha256:1"), AdapterKey("acme", "sha256:2")
names = count()


def make_request(
    prompt: Sequence[int], output: Sequence[int] = (), key: AdapterKey | None = KEY
) -> Request:
    tenant = key.tenant_id if key else "acme"
    name = f"r{next(names)}"
    submitted = GenerationRequest(name, tenant, list(prompt), SamplingParams(), key)
    namespace = CacheNamespace(tenant, "runtime", key)
    request = Request(submitted, namespace, seed=0, arrival_time=0.0, adapter_tier=None)
    request.token_ids += output
    return request


def propose(proposer: SuffixProposer, request: Request, num_tokens: int = 4) -> list[int]:
    (draft,) = proposer.propose([DraftRequest(request, num_tokens)])
    assert draft.parents is None
    assert draft.probabilities is None
    return list(draft.token_ids)


def after(*outputs: Sequence[int]) -> SuffixProposer:
    """A proposer that remembers these outputs."""
    proposer = SuffixProposer()
    for output in outputs:
        proposer.remember(make_request([], output), 0.0)
    return proposer


# --- the draft ------------------------------------------------------------------------------------


def voted(outputs: list[list[int]], text: list[int], num_tokens: int) -> set[tuple[int, ...]]:
    """All drafts of the most frequent continuation, found by trying every position; the text has no
    matches of its own."""

    def match_len(known: list[int], end: int) -> int:
        lengths = range(1, min(LONGEST, end, len(text)) + 1)
        return max((n for n in lengths if known[end - n : end] == text[-n:]), default=0)

    places = [(known, end) for known in outputs for end in range(len(known))]
    longest = max((match_len(*place) for place in places), default=0)
    if not longest:
        return {()}
    tails = [known[end:] for known, end in places if match_len(known, end) == longest]
    drafts: set[tuple[int, ...]] = {()}
    for place in range(min(num_tokens, DRAFTS_PER_TOKEN * longest)):
        grown: set[tuple[int, ...]] = set()
        for draft in drafts:
            votes = Counter(
                tail[place] for tail in tails if tuple(tail[:place]) == draft and tail[place:]
            )
            most = max(votes.values(), default=0)
            grown |= {(*draft, token) for token in votes if votes[token] == most}
            if not votes:
                grown.add(draft)
        drafts = grown
    return drafts


short = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(outputs=st.lists(short, max_size=3), end=short, num_tokens=st.integers(1, 9))
def test_it_drafts_the_most_frequent_continuation_of_the_longest_match(
    outputs: list[list[int]], end: list[int], num_tokens: int
) -> None:
    # Tokens that occur once, so that the request does not repeat itself.
    text = [*range(100, 103), end[0]]
    drafted = propose(after(*outputs), make_request(text), num_tokens)
    assert tuple(drafted) in voted(outputs, text, num_tokens)
    longer = [*outputs, [100, 101, 102, *end]]
    drafted = propose(after(*longer), make_request(text), num_tokens)
    assert tuple(drafted) in voted(longer, text, num_tokens)


def test_the_majority_of_the_outputs_decides_token_by_token() -> None:
    proposer = after([1, 2, 5, 7, 9], [1, 2, 6, 7, 7], [1, 2, 5, 7, 8], [1, 2, 5, 6], [1, 2, 5, 7])
    assert propose(proposer, make_request([1, 2])) == [5, 7, 9]


def test_the_request_itself_votes_too_and_decides_between_equals() -> None:
    request = make_request([1, 2, 8, 8, 3, 1, 2])
    assert propose(after([1, 2, 5]), request, 1) == [8]
    assert propose(after([1, 2, 5], [1, 2, 5]), request, 1) == [5]


def test_a_longer_match_counts_more_than_a_frequent_one() -> None:
    outputs = [[1, 2, 5]] * 5
    assert propose(after([3, 1, 2, 6], *outputs), make_request([3, 1, 2]), 1) == [6]
    assert propose(after(*outputs), make_request([3, 1, 2, 7, 3, 1, 2]), 1) == [7]


def test_a_draft_grows_with_the_length_of_its_match() -> None:
    proposer = after([0, 1, 2, *range(50, 90)])
    lengths = [len(propose(proposer, make_request(end), 30)) for end in ([2], [1, 2], [0, 1, 2])]
    assert lengths == [DRAFTS_PER_TOKEN * length for length in (1, 2, 3)]


def test_the_beginning_of_an_output_is_drafted_after_the_end_of_the_prompt() -> None:
    proposer = SuffixProposer()
    proposer.remember(make_request([30, 31, 7, 8, 9], [1, 2, 3]), 0.0)
    assert propose(proposer, make_request([40, 7, 8, 9])) == [1, 2, 3]
    assert propose(proposer, make_request([30, 31])) == []


# --- whose outputs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", [OTHER, AdapterKey("bolt", KEY.digest), None], ids=["version", "tenant", "base"]
)
def test_outputs_of_another_version_or_tenant_are_not_drafted_from(key: AdapterKey | None) -> None:
    proposer = after([1, 2, 5, 6])
    assert propose(proposer, make_request([1, 2], key=key)) == []
    assert propose(proposer, make_request([1, 2])) == [5, 6]


def test_a_request_leaves_nothing_unless_it_is_remembered() -> None:
    proposer = SuffixProposer()
    request = make_request([1, 2, 5, 1, 2])
    assert propose(proposer, request) == [5, 1, 2, 5]
    proposer.forget(request.request_id)
    proposer.forget("unknown")
    assert proposer.num_remembered_tokens == 0
    assert propose(proposer, make_request([3, 1, 2])) == []


# --- in the engine --------------------------------------------------------------------------------

PHRASE = list(range(40, 70))
EAGER = SpeculationParams(num_tokens=5)


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def open_engine(base: Path, path: Path, clock: Callable[[], float]) -> LocalEngine:
    return LocalEngine(base, path, speculation=("suffix",), clock=clock)


def remembered(engine: LocalEngine) -> int:
    proposer = engine.core.parts.speculation._proposers["suffix"]
    assert isinstance(proposer, SuffixProposer)
    return proposer.num_remembered_tokens


def ask(
    engine: LocalEngine, key: AdapterKey | None, *, remembers_output: bool = True, **options: object
) -> tuple[list[int], int, int]:
    """The output, and how many tokens were drafted and accepted."""
    name = engine.submit(
        PHRASE,
        key,
        remembers_output=remembers_output,
        speculation=EAGER,
        **{"max_tokens": 30, "ignore_eos": True, **options},  # type: ignore[arg-type]
    )
    engine.run()
    end = engine.answers[name].end
    return engine.answers[name].token_ids, end.num_draft_tokens, end.num_accepted_tokens


def run_some(engine: LocalEngine, name: str) -> None:
    """Until this request has some tokens."""
    while len(engine.answers[name].token_ids) <= 3:
        engine.step()


@pytest.mark.parametrize("temperature", marked_slow([0.9, 0.0], slow=[0.0]))
def test_recurring_requests_are_drafted_from_their_first_answers_and_answered_alike(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, temperature: float
) -> None:
    """The base and both adapters in one batch, twice."""

    def answer_twice(engine: LocalEngine) -> list[tuple[list[list[int]], int]]:
        """The outputs of each time, and how many draft tokens were accepted."""
        keys = [None, *map(engine.add_adapter, adapter_folders)]
        rounds = []
        for _ in range(2):
            submitted = [
                engine.submit(
                    PHRASE[index:],
                    keys[index % len(keys)],
                    remembers_output=True,
                    speculation=EAGER,
                    max_tokens=30,
                    ignore_eos=True,
                    temperature=temperature,
                    seed=index,
                )
                for index in range(6)
            ]
            engine.run()
            accepted = sum(engine.answers[name].end.num_accepted_tokens for name in submitted)
            rounds.append((engine.tokens(submitted), accepted))
        engine.close()
        return rounds

    (plain, _), (plain_again, _) = answer_twice(LocalEngine(tiny_base, tmp_path))
    (first, few), (again, many) = answer_twice(open_engine(tiny_base, tmp_path, Clock()))
    assert first == again == plain == plain_again
    assert many > few + 4 * 12


def test_an_output_that_may_not_be_remembered_or_is_the_bases_is_not(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    engine = open_engine(tiny_base, tmp_path, Clock())
    key = engine.add_adapter(adapter_folders[0])
    ask(engine, key, remembers_output=False)
    ask(engine, None)
    assert remembered(engine) == 0
    broken_off = engine.submit(PHRASE, key, max_tokens=30, remembers_output=True)
    run_some(engine, broken_off)
    engine.abort(broken_off)
    engine.run()
    assert remembered(engine) == 0
    ask(engine, key)
    assert remembered(engine) == 30
    engine.close()


def test_a_canary_of_one_tenant_is_never_drafted_for_another(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    """The same adapter of two tenants, and another version of the first: each asks what the first
    has asked, and is drafted nothing of its answer."""
    engine = open_engine(tiny_base, tmp_path, Clock())
    key = engine.add_adapter(adapter_folders[0])
    canary = ask(engine, key, temperature=2.0, seed=1)[0]
    foreign = engine.add_adapter(adapter_folders[0], tenant_id="bolt")
    other = engine.add_adapter(adapter_folders[1])
    drafted: list[list[int]] = []
    proposer = engine.core.parts.speculation._proposers["suffix"]
    assert isinstance(proposer, SuffixProposer)
    draft = proposer.propose

    def noted(wanted: Sequence[DraftRequest]) -> object:
        drafts = draft(wanted)
        drafted.extend(list(each.token_ids) for each in drafts)
        return drafts

    proposer.propose = noted  # type: ignore[method-assign,assignment]
    for stranger in (foreign, other, None):
        drafted.clear()
        assert ask(engine, stranger, temperature=2.0, seed=1, remembers_output=False)[2] == 0
        pairs = {tuple(tokens[:2]) for tokens in drafted if len(tokens) > 1}
        assert not pairs & set(pairwise(canary))
    assert ask(engine, key, temperature=2.0, seed=1)[2] > 15
    engine.close()


@pytest.mark.parametrize("how", ["deleted", "opted out", "too old"])
def test_outputs_are_gone_once_the_adapter_is_deleted_or_its_samples_or_after_an_hour(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path, how: str
) -> None:
    clock = Clock()
    engine = open_engine(tiny_base, tmp_path, clock)
    kept, dropped = map(engine.add_adapter, adapter_folders)
    ask(engine, dropped)
    clock.now = MAX_AGE_SECONDS / 2
    ask(engine, kept)
    open_request = engine.submit(
        PHRASE, dropped, max_tokens=20, ignore_eos=True, remembers_output=True
    )
    run_some(engine, open_request)
    match how:
        case "deleted":
            engine.core.handle(DeleteAdapter(dropped, 60.0))
        case "opted out":
            engine.core.handle(ForgetOutputs(dropped))
            assert remembered(engine) == 30
        case "too old":
            clock.now = MAX_AGE_SECONDS + 1.0
            engine.step()
            assert remembered(engine) == 30
    engine.run()
    assert len(engine.answers[open_request].token_ids) == 20
    assert remembered(engine) == (50 if how == "too old" else 30)
    assert (dropped in engine.evicted) == (how == "deleted")
    engine.close()
