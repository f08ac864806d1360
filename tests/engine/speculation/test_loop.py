"""Whatever is drafted, and whatever fails, requests end as with plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.draft import NO_DRAFT, Draft
from loraplex.engine.execution.runner import StepOutput
from loraplex.engine.heartbeat import Heartbeat
from loraplex.engine.messages import (
    Abort,
    DeleteAdapter,
    FinishReason,
    RequestFinished,
    SpeculationParams,
)
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledSequence
from loraplex.engine.scheduling.step_costs import StepCosts
from loraplex.engine.speculation.proposer import DraftRequest
from support.engine import LocalEngine
from support.speculation import (
    ScriptedProposer,
    ScriptedTreeProposer,
    assert_same_answer,
    scripted,
)

EAGER = SpeculationParams(num_tokens=5)
"""So many draft tokens a step, whether that pays or not."""
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
BLOCK_BYTES = 8192
"""Of sixteen tokens of the tiny base."""


Open = Callable[..., LocalEngine]
"""Takes a proposer, if there is to be one, and fields of the configuration."""


@pytest.fixture
def open_engine(tiny_base: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens engines, with the given proposer if there is one, that are closed in the end."""
    engines: list[LocalEngine] = []

    def open_one(proposer: ScriptedProposer | None = None, **config: Any) -> LocalEngine:
        if proposer is None:
            engine = LocalEngine(tiny_base, tmp_path, **config)
        else:
            with scripted(proposer) as name:
                engine = LocalEngine(tiny_base, tmp_path, speculation=(name,), **config)
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def plain(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """Decodes without draft tokens."""
    engine = LocalEngine(tiny_base, tmp_path_factory.mktemp("plain"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(plain: LocalEngine) -> list[int]:
    """The greedy answer to PROMPT."""
    return plain.generate(PROMPT)


def answer_of(plain: LocalEngine, prompt: Sequence[int], **sampling: Any) -> list[int]:
    request_id = plain.submit(prompt, ignore_eos=True, **sampling)
    plain.run()
    return plain.answers[request_id].token_ids


class Misbehaving(ScriptedProposer):
    """Lets a test decide about each draft, given the right one."""

    def __init__(self, spoil: Callable[[DraftRequest, Draft], Draft], *answer: int) -> None:
        super().__init__({"r0": answer})
        self._change = spoil

    def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(wanted)
        return [self._change(entry, draft) for entry, draft in zip(wanted, drafts, strict=True)]


def end_of(engine: LocalEngine, request_id: str = "r0") -> RequestFinished:
    return engine.answers[request_id].end


class Noted(NamedTuple):
    """One sequence of a step, as it stood before the step ran."""

    num_tokens: int
    num_draft_tokens: int
    context_len: int
    samples: bool


def note_steps(engine: LocalEngine) -> list[list[Noted]]:
    """What the steps compute that the engine runs from now on."""
    steps: list[list[Noted]] = []
    run = engine.core.parts.runner.run

    def noting(sequences: tuple[ScheduledSequence, ...], sampled: Any) -> StepOutput:
        steps.append(
            [
                Noted(entry.num_tokens, entry.num_draft_tokens, entry.context_len, entry.samples)
                for entry in sequences
            ]
        )
        return run(sequences, sampled)

    vars(engine.core.parts.runner)["run"] = noting
    return steps


def assert_nothing_is_held(engine: LocalEngine) -> None:
    stats = engine.core.stats()
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks
    assert stats.num_running == stats.num_waiting == 0
    assert all(adapter.num_leases == 0 for adapter in stats.adapters)
    assert not engine.core.parts.speculation._choices


def load(engine: LocalEngine, keys: Sequence[AdapterKey | None]) -> None:
    """Let the adapters be there from the start: who runs with whom decides the rounding."""
    for key in keys:
        engine.submit([1], key, max_tokens=1)
    engine.run()


def submit_crowd(engine: LocalEngine, folders: Sequence[Path], temperature: float) -> None:
    """Requests of every kind: adapters, penalties, biases, log-probabilities, groups of three."""
    keys = [None, *map(engine.add_adapter, folders)]
    load(engine, keys)
    rng = random.Random(11)
    system = [rng.randrange(256) for _ in range(20)]
    for number in range(9):
        prompt = [*(system if number % 2 else []), *rng.choices(range(256), k=number + 1)]
        sampling: dict[str, Any] = {
            "max_tokens": 28,
            "temperature": temperature,
            "frequency_penalty": 0.6 * (number % 3 == 1),
            "repetition_penalty": 1.2 if number % 4 == 2 else 1.0,
            "logit_bias": {7: 3.0} if number % 3 == 2 else {},
            "num_logprobs": (None, 0, 3)[number % 3],
            "top_p": 0.9 if number % 2 else 1.0,
        }
        num_choices = 3 if number in (2, 5) else 1
        for choice in range(num_choices):
            engine.submit(
                prompt,
                keys[number % len(keys)],
                request_id=f"{number}.{choice}",
                group_id=f"g{number}" if num_choices > 1 else None,
                speculation=EAGER,
                seed=10 * number + choice,
                **sampling,
            )
        engine.step()


Crowd = Callable[[float], tuple[LocalEngine, dict[str, list[int]]]]


@pytest.fixture(scope="module")
def crowd_of(
    tiny_base: Path, adapter_folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crowd]:
    """The crowd at a temperature, decoded without draft tokens, and its answers by request."""
    engines: list[LocalEngine] = []

    @cache
    def run(temperature: float) -> tuple[LocalEngine, dict[str, list[int]]]:
        engine = LocalEngine(tiny_base, tmp_path_factory.mktemp("crowd"))
        engines.append(engine)
        submit_crowd(engine, adapter_folders, temperature)
        engine.run()
        return engine, {name: answer.token_ids for name, answer in engine.answers.items()}

    yield run
    for engine in engines:
        engine.close()


def assert_same_answers(actual: LocalEngine, expected: LocalEngine) -> None:
    assert actual.answers.keys() == expected.answers.keys()
    for request_id, answer in expected.answers.items():
        assert_same_answer(actual.answers[request_id], answer)


@pytest.mark.parametrize("temperature", [0.0, 0.7, pytest.param(1.3, marks=pytest.mark.slow)])
def test_a_mixed_batch_answers_as_with_plain_decoding_however_good_the_drafts_are(
    open_engine: Open, adapter_folders: list[Path], temperature: float, crowd_of: Crowd
) -> None:
    plain, answers = crowd_of(temperature)
    num_tokens = sum(map(len, answers.values()))
    num_steps = {}
    for error in (0.0, 0.4, 1.0):
        engine = open_engine(ScriptedProposer(answers, error=error))
        submit_crowd(engine, adapter_folders, temperature)
        engine.run()
        assert_same_answers(engine, plain)
        assert_nothing_is_held(engine)
        ends = [end_of(engine, name) for name in answers]
        num_drafted = sum(end.num_draft_tokens for end in ends)
        num_accepted = sum(end.num_accepted_tokens for end in ends)
        num_steps[error] = engine.core.stats().num_steps
        if error == 0.0:
            assert num_accepted == num_drafted > num_tokens // 2
        else:
            assert num_accepted < num_drafted
    assert num_steps[0.0] < num_steps[0.4] < num_steps[1.0]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("swap_bytes", [0, 1 << 20])
def test_a_crowd_that_runs_out_of_blocks_answers_as_with_plain_decoding(
    open_engine: Open,
    adapter_folders: list[Path],
    swap_bytes: int,
    prefix_caching: bool,
    crowd_of: Crowd,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Which of the two pays is measured, so it would depend on the machine's load.
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)
    plain, answers = crowd_of(0.7)
    engine = open_engine(
        ScriptedProposer(answers, error=0.3),
        kv_cache_bytes=14 * BLOCK_BYTES,
        swap_bytes=swap_bytes,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=40,
        max_num_seqs=12,
    )
    submit_crowd(engine, adapter_folders, 0.7)
    engine.run()
    assert_same_answers(engine, plain)
    assert_nothing_is_held(engine)
    scheduler = engine.core.parts.scheduler
    assert scheduler.num_preemptions > 0, "the pool was meant to be too small"
    assert bool(scheduler.num_swaps) == bool(swap_bytes)
    assert sum(end_of(engine, name).num_accepted_tokens for name in answers) > 50


@pytest.mark.parametrize("prompt_length", [1, 16, 17])
def test_an_attention_window_moves_by_what_is_accepted(
    open_engine: Open, prompt_length: int
) -> None:
    rng = random.Random(prompt_length)
    prompt = [rng.randrange(256) for _ in range(prompt_length)]
    answer = answer_of(open_engine(attention_window=24), prompt, max_tokens=90)
    engine = open_engine(ScriptedProposer({"r0": answer}, error=0.3), attention_window=24)
    engine.submit(prompt, max_tokens=90, ignore_eos=True, speculation=EAGER)
    engine.run()
    assert engine.answers["r0"].token_ids == answer
    assert end_of(engine).num_accepted_tokens > 20
    assert_nothing_is_held(engine)


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [1, 4, 5, 6])
def test_a_stop_token_inside_an_accepted_draft_ends_the_answer_there(
    open_engine: Open, place: int, plain: LocalEngine
) -> None:
    answer = answer_of(plain, PROMPT, max_tokens=30, temperature=1.3, seed=1)
    stop = answer[place]
    length = answer.index(stop) + 1
    engine = open_engine(ScriptedProposer({"r0": answer}))
    engine.submit(
        PROMPT,
        max_tokens=30,
        temperature=1.3,
        seed=1,
        ignore_eos=True,
        stop_token_ids=(stop,),
        num_logprobs=0,
        speculation=EAGER,
    )
    engine.run()
    end = end_of(engine)
    assert engine.answers["r0"].token_ids == answer[:length]
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert end.num_generated_tokens == length
    assert end.num_accepted_tokens < length
    events = engine.answers["r0"].tokens
    assert [len(event.logprobs or ()) for event in events] == [len(e.token_ids) for e in events]
    assert_nothing_is_held(engine)


def test_the_end_of_sequence_inside_an_accepted_draft_ends_the_answer_there(
    open_engine: Open, plain: LocalEngine
) -> None:
    (eos,) = plain.core.parts.base.eos_token_ids
    answer = answer_of(plain, PROMPT, max_tokens=12, logit_bias={eos: 100.0})
    assert answer == [eos] * 12
    engine = open_engine(ScriptedProposer({"r0": answer, "r1": answer}))
    engine.submit(PROMPT, max_tokens=12, logit_bias={eos: 100.0}, speculation=EAGER)
    engine.submit(
        PROMPT, max_tokens=12, logit_bias={eos: 100.0}, speculation=EAGER, ignore_eos=True
    )
    engine.run()
    assert engine.answers["r0"].token_ids == [eos]
    assert end_of(engine).reason is FinishReason.STOP
    assert engine.answers["r1"].token_ids == answer
    assert end_of(engine, "r1").reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 7])
def test_no_more_is_drafted_than_may_be_generated(
    open_engine: Open, max_tokens: int, plain: LocalEngine
) -> None:
    answer = answer_of(plain, PROMPT, max_tokens=max_tokens)
    length = len(PROMPT) + max_tokens
    engine = open_engine(ScriptedProposer({"r0": answer}), max_model_len=length)
    chunks = note_steps(engine)
    engine.submit(PROMPT, max_tokens=max_tokens, ignore_eos=True, speculation=EAGER)
    engine.run()
    assert engine.answers["r0"].token_ids == answer
    assert end_of(engine).reason is FinishReason.LENGTH
    assert max(entry.context_len for step in chunks for entry in step) < length


# --- what breaks ----------------------------------------------------------------------------------


def misbehave(kind: str) -> Callable[[DraftRequest, Draft], Draft]:
    def raises(wanted: DraftRequest, draft: Draft) -> Draft:
        raise RuntimeError("a proposer's defect")

    def says_too_much(wanted: DraftRequest, draft: Draft) -> Draft:
        return Draft((*draft.token_ids, *range(100)))

    def says_no_token(wanted: DraftRequest, draft: Draft) -> Draft:
        return Draft((*draft.token_ids[:2], -1, 1 << 40))

    def says_what_is_no_tree(wanted: DraftRequest, draft: Draft) -> Draft:
        return Draft((1, 2, 3), parents=(2, 0, 1))

    def says_nothing(wanted: DraftRequest, draft: Draft) -> Draft:
        return NO_DRAFT

    found: Callable[[DraftRequest, Draft], Draft] = locals()[kind]
    return found


@pytest.mark.parametrize(
    "kind",
    ["raises", "says_too_much", "says_no_token", "says_what_is_no_tree", "says_nothing"],
)
def test_a_proposer_that_fails_costs_nothing_but_time(
    open_engine: Open, kind: str, expected: list[int]
) -> None:
    engine = open_engine(Misbehaving(misbehave(kind), *expected))
    engine.submit(PROMPT, speculation=EAGER)
    engine.run()
    assert engine.answers["r0"].token_ids == expected
    assert_nothing_is_held(engine)


def test_a_proposer_that_loses_drafts_costs_nothing_but_time(
    open_engine: Open, expected: list[int]
) -> None:
    class Losing(ScriptedProposer):
        def propose(self, wanted: Sequence[DraftRequest]) -> list[Draft]:
            return super().propose(wanted)[1:]

    engine = open_engine(Losing({}))
    ids = [engine.submit(PROMPT, speculation=EAGER) for _ in range(3)]
    engine.run()
    assert engine.tokens(ids) == [expected] * 3


def test_a_proposer_that_fails_to_listen_costs_nothing(
    open_engine: Open, expected: list[int]
) -> None:
    class Deaf(ScriptedProposer):
        def observe(self, *_: object) -> None:
            raise RuntimeError("a proposer's defect")

        def forget(self, request_id: str) -> None:
            raise RuntimeError("another")

    engine = open_engine(Deaf({"r0": expected}))
    engine.submit(PROMPT, speculation=EAGER)
    engine.run()
    assert engine.answers["r0"].token_ids == expected
    assert end_of(engine).num_accepted_tokens > 5


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_draft_that_overflows_harms_nothing(
    tiny_base: Path, open_engine: Open, place: int, expected: list[int]
) -> None:
    """Its keys and values are not finite: they would spoil what comes before and after it."""
    overflowing = next(token for token in range(256) if token not in (*PROMPT, *expected))

    def spoil(wanted: DraftRequest, draft: Draft) -> Draft:
        return Draft((*draft.token_ids[:place], overflowing, *draft.token_ids[place:])[:5])

    engine = open_engine(Misbehaving(spoil, *expected))
    engine.core.parts.base.model.get_input_embeddings().weight[overflowing] = float("inf")
    engine.submit(PROMPT, speculation=EAGER)
    other = engine.submit(PROMPT[:5], max_tokens=40, ignore_eos=True)
    engine.run()
    assert engine.answers["r0"].token_ids == expected
    assert end_of(engine).reason is not FinishReason.ERROR
    assert end_of(engine, other).reason is FinishReason.LENGTH
    again = engine.submit([*PROMPT, *expected[:-1]], max_tokens=1)
    engine.run()
    assert engine.answers[again].token_ids == expected[-1:]


def test_a_step_that_fails_for_a_draft_runs_without_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    engine = open_engine(ScriptedProposer({"r0": expected, "r1": expected}))
    run = engine.core.parts.runner.run

    def fail_on_drafts(sequences: tuple[ScheduledSequence, ...], sampled: Any) -> StepOutput:
        if any(sequence.num_draft_tokens for sequence in sequences):
            raise RuntimeError("a defect that drafts trigger")
        return run(sequences, sampled)

    monkeypatch.setattr(engine.core.parts.runner, "run", fail_on_drafts)
    ids = [engine.submit(PROMPT, speculation=EAGER) for _ in range(2)]
    engine.run()
    assert engine.tokens(ids) == [expected] * 2
    assert_nothing_is_held(engine)


def test_a_verification_that_fails_for_a_draft_draws_without_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    engine = open_engine(ScriptedProposer({"r0": expected, "r1": expected}))
    acceptor = engine.core.parts.speculation.acceptor
    accept = acceptor.accept

    def fail_on_drafts(requests: Sequence[Any], logits: torch.Tensor) -> Any:
        if any(len(request.draft) for request in requests):
            raise RuntimeError("a defect that drafts trigger")
        return accept(requests, logits)

    monkeypatch.setattr(acceptor, "accept", fail_on_drafts)
    ids = [engine.submit(PROMPT, speculation=EAGER) for _ in range(2)]
    engine.run()
    assert engine.tokens(ids) == [expected] * 2


def test_drafts_that_cannot_be_put_in_their_places_are_done_without(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    def fail_on_drafts(_request: Request, path: Sequence[int]) -> None:
        if path:
            raise RuntimeError("a defect that accepted drafts trigger")

    engine = open_engine(ScriptedTreeProposer({"r0": expected}))
    monkeypatch.setattr(engine.core.parts.runner, "keep", fail_on_drafts)
    engine.submit(PROMPT, speculation=EAGER)
    other = engine.submit(PROMPT, speculation=SpeculationParams(num_tokens=0))
    engine.run()
    assert engine.tokens(["r0", other]) == [expected] * 2
    assert end_of(engine).num_draft_tokens > 0
    assert end_of(engine).num_accepted_tokens == 0
    assert_nothing_is_held(engine)


def test_a_lease_that_goes_stale_while_tokens_are_drafted_ends_its_request_and_no_other(
    open_engine: Open, adapter_folders: list[Path], expected: list[int]
) -> None:
    def lose_lease(wanted: DraftRequest, draft: Draft) -> Draft:
        request = wanted.request
        if request.lease and request.num_generated_tokens > 4:
            request.lease = request.lease._replace(generation=request.lease.generation + 1)
        return draft

    engine = open_engine(Misbehaving(lose_lease, *expected))
    engine.submit(PROMPT, speculation=EAGER)
    stale = engine.submit(
        PROMPT,
        engine.add_adapter(adapter_folders[0]),
        speculation=EAGER,
        max_tokens=60,
        ignore_eos=True,
    )
    engine.run()
    error = end_of(engine, stale).error
    assert error is not None
    assert error.code == "stale_extent"
    assert engine.answers["r0"].token_ids == expected
    assert_nothing_is_held(engine)


# --- around it ------------------------------------------------------------------------------------


def test_requests_that_are_aborted_while_they_draft_leave_nothing(open_engine: Open) -> None:
    proposer = ScriptedProposer({f"r{i}": range(200) for i in range(8)})
    engine = open_engine(proposer, kv_cache_bytes=30 * BLOCK_BYTES)
    ids = [
        engine.submit(PROMPT, max_tokens=100, ignore_eos=True, speculation=EAGER) for _ in range(8)
    ]
    for request_id in ids:
        engine.step()
        engine.core.handle(Abort(request_id))
    engine.run()
    assert all(end_of(engine, request_id).reason is FinishReason.ABORTED for request_id in ids)
    assert set(proposer.forgotten) == set(ids)
    assert_nothing_is_held(engine)


def test_a_deletion_waits_for_those_that_draft(
    open_engine: Open, adapter_folders: list[Path]
) -> None:
    plain = open_engine()
    key = plain.add_adapter(adapter_folders[0])
    expected = plain.generate(PROMPT, key)
    engine = open_engine(ScriptedProposer({"r0": expected}))
    assert engine.add_adapter(adapter_folders[0]) == key
    engine.submit(PROMPT, key, speculation=EAGER)
    while not engine.answers["r0"].token_ids:
        engine.step()
    engine.core.handle(DeleteAdapter(key, 60.0))
    engine.run()
    assert engine.answers["r0"].token_ids == expected
    assert [receipt.num_drained for receipt in engine.receipts] == [1]


def test_prompts_go_on_beside_drafts_within_the_step_s_tokens(
    open_engine: Open, expected: list[int]
) -> None:
    answers = {f"r{i}": [*expected[:3], 1, 2] * 30 for i in range(4)}
    engine = open_engine(ScriptedProposer(answers), max_num_batched_tokens=24, max_num_seqs=8)
    steps = note_steps(engine)
    for _ in range(4):
        engine.submit(PROMPT, max_tokens=60, ignore_eos=True, speculation=EAGER)
    while not all(answer.token_ids for answer in engine.answers.values()):
        engine.step()
    late = engine.submit(list(range(100)), max_tokens=3)
    engine.run()
    assert end_of(engine, late).num_generated_tokens
    assert max(sum(entry.num_tokens for entry in step) for step in steps) <= 24
    mixed = [
        step
        for step in steps
        if any(entry.num_draft_tokens for entry in step)
        and any(not entry.samples for entry in step)
    ]
    assert mixed, "the long prompt was meant to run beside drafts"
    with_all = [step for step in steps if sum(entry.num_draft_tokens for entry in step) > 8]
    assert with_all, "where there is no prompt, drafts take what is left of the step"


def test_tenants_are_charged_for_what_they_get(open_engine: Open) -> None:
    plain = open_engine()
    plain.submit(PROMPT, max_tokens=30, ignore_eos=True)
    plain.run()
    answer = plain.answers["r0"].token_ids
    engine = open_engine(ScriptedProposer({"r0": answer}, error=0.5))
    engine.submit(PROMPT, max_tokens=30, ignore_eos=True, speculation=EAGER)
    engine.run()
    assert end_of(engine).num_draft_tokens > end_of(engine).num_accepted_tokens > 0
    assert engine.core.stats().tenant_service == plain.core.stats().tenant_service
    assert engine.core.parts.scheduler.counters.counter("acme") == pytest.approx(
        plain.core.parts.scheduler.counters.counter("acme")
    )


def test_blocks_of_rejected_drafts_are_given_back_at_once(open_engine: Open) -> None:
    engine = open_engine(ScriptedProposer({"r0": [1] * 200}), max_draft_tokens=64)
    wishes = SpeculationParams(num_tokens=64)
    engine.submit(PROMPT, max_tokens=100, ignore_eos=True, speculation=wishes)
    steps = note_steps(engine)
    while not engine.answers["r0"].finished:
        engine.step()
        request = engine.core.parts.scheduler.get("r0")
        if request:
            assert len(request.kv.tables[0]) <= -(-len(request.token_ids) // 16)
    assert max(entry.num_draft_tokens for step in steps for entry in step) > 48


def test_a_proposer_that_hangs_is_blamed_on_the_requests_of_its_step(
    open_engine: Open, tmp_path: Path
) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    named: list[frozenset[str]] = []

    def look(wanted: DraftRequest, draft: Draft) -> Draft:
        named.append(heartbeat.step_request_ids)
        return draft

    engine = open_engine(Misbehaving(look))
    engine.core.report_progress_to(heartbeat)
    engine.submit(PROMPT, speculation=EAGER)
    engine.run()
    engine.submit(PROMPT, speculation=EAGER)
    engine.run()
    assert set(named) == {frozenset({"r0"}), frozenset({"r1"})}
