"""Steps that are scheduled and launched while another is in flight: the answers are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.execution.runner import StepOutput
from loraplex.engine.execution.sampler import sample_tokens
from loraplex.engine.heartbeat import Heartbeat
from loraplex.engine.messages import DeleteAdapter, FinishReason, Pooling
from support.engine import Answer, LocalEngine
from support.models import make_adapter
from support.step_output import output_of

PROMPT = list(range(20))
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 5}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 9},
    "drawn": {"max_tokens": 12, **DRAWN, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "penalties": {"max_tokens": 12, **DRAWN, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "biased": {"max_tokens": 6, "logit_bias": {3: 2.0, 7: -50.0}},
    "logprobs": {"max_tokens": 7, **DRAWN, "num_logprobs": 3},
    "other logprobs": {"max_tokens": 5, "num_logprobs": 0},
    "logits": {"max_tokens": 3, "return_logits": True},
    "one token": {"max_tokens": 1},
    "no token": {"max_tokens": 0},
    "embedding": {"max_tokens": 0, "pooling": Pooling.MEAN},
    "prompt logprobs": {"max_tokens": 4, "num_prompt_logprobs": 2},
}


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = open_engine(tiny_base, tmp_path)
    yield engine
    engine.close()


def open_engine(
    base: Path, folder: Path, *, async_scheduling: bool = True, **settings: object
) -> LocalEngine:
    """Steps of at most 16 tokens: prompts take several."""
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 12, "dtype": "float32", **settings}
    return LocalEngine(base, folder, async_scheduling=async_scheduling, **settings)


def count_launches(engine: LocalEngine) -> list[int]:
    """How many steps were in flight at each launch that follows, the launched one included."""
    execution, numbers = engine.core._executor._execution, []
    launch = execution.launch

    def count(sequences: Any, before: Any = None) -> Any:
        numbers.append(1 + (before is not None))
        return launch(sequences, before)

    vars(execution)["launch"] = count
    return numbers


def ask(engine: LocalEngine, keys: Iterable[AdapterKey | None]) -> list[Answer]:
    """Every kind of request under each adapter, arriving step by step."""
    ids = []
    for key in keys:
        for number, request in enumerate(REQUESTS.values()):
            prompt = PROMPT[number:] + PROMPT[:number]
            ids.append(engine.submit(prompt, key, ignore_eos=True, **request))
            engine.step()
    engine.run()
    return [engine.answers[request_id] for request_id in ids]


def summary(answer: Answer) -> object:
    """What the caller sees, with numbers up to rounding."""
    logprobs = [
        (entry.chosen.token_id, [top.token_id for top in entry.top])
        for event in answer.tokens
        for entry in event.logprobs or ()
    ]
    has_logits = [event.logits is not None for event in answer.tokens]
    read = [entry.chosen.token_id for part in answer.prompts for entry in part.logprobs or ()]
    num_vectors = sum(part.embedding is not None for part in answer.prompts)
    return answer.token_ids, answer.end.reason, logprobs, has_logits, read, num_vectors


def test_every_kind_of_request_gets_the_same_answer(tiny_base: Path, tmp_path: Path) -> None:
    answers = {}
    for is_async in (False, True):
        engine = open_engine(tiny_base, tmp_path, async_scheduling=is_async)
        folders = [tmp_path / f"{is_async}{seed}" for seed in range(2)]
        keys = [
            engine.add_adapter(make_adapter(tiny_base, folder, seed=seed, r=4))
            for seed, folder in enumerate(folders)
        ]
        numbers = count_launches(engine)
        answers[is_async] = list(map(summary, ask(engine, [None, *keys])))
        assert (numbers.count(2) > len(numbers) // 3) == is_async
        assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks
        engine.close()
    assert answers[True] == answers[False]


def test_choices_of_one_prompt_fork_from_a_parent_that_is_not_in_flight(
    tiny_base: Path, tmp_path: Path
) -> None:
    answers = []
    for is_async in (False, True):
        engine = open_engine(tiny_base, tmp_path, async_scheduling=is_async)
        other = engine.submit([9] * 5, max_tokens=30)
        ids = [
            engine.submit(PROMPT, group_id="g", max_tokens=8, temperature=0.9, seed=seed)
            for seed in range(4)
        ]
        engine.run()
        assert engine.core.parts.scheduler.num_forks == 3
        answers.append(engine.tokens([other, *ids]))
        engine.close()
    assert answers[0] == answers[1]


def test_a_stop_token_ends_an_answer_though_the_next_step_computes_it_once_more(
    engine: LocalEngine,
) -> None:
    whole = engine.submit(PROMPT, max_tokens=12, ignore_eos=True, **DRAWN)
    engine.run()
    tokens = engine.answers[whole].token_ids
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    length = tokens.index(stop) + 1
    numbers = count_launches(engine)
    ids = [
        engine.submit(PROMPT, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], **DRAWN),
        engine.submit(PROMPT, max_tokens=length + 6, ignore_eos=True, **DRAWN),
    ]
    engine.run()
    assert engine.answers[ids[0]].token_ids == tokens[:length]
    assert engine.answers[ids[0]].end.reason is FinishReason.STOP
    assert engine.answers[ids[1]].token_ids[: len(tokens)] == tokens[: length + 6]
    assert 2 in numbers


def test_an_aborted_request_gets_nothing_of_the_steps_in_flight_and_frees_its_lease_after_them(
    engine: LocalEngine, tiny_base: Path, tmp_path: Path
) -> None:
    key = engine.add_adapter(make_adapter(tiny_base, tmp_path / "adapter", seed=1))
    request_id = engine.submit([1, 2, 3], key, max_tokens=50)
    while len(engine.answers[request_id].token_ids) < 4:
        engine.step()
    engine.abort(request_id)
    manager = engine.core.parts.tiers.manager
    assert manager._leases.get(request_id) is not None, "the step in flight reads the adapter"
    assert engine.core.has_work
    engine.core.handle(DeleteAdapter(key, 0.0))
    engine.step()
    assert manager._leases.get(request_id) is None
    engine.run()
    assert len(engine.answers[request_id].token_ids) == 4
    assert engine.answers[request_id].end.reason is FinishReason.ABORTED
    assert engine.evicted == [key]


def test_the_heartbeat_names_the_requests_of_both_steps_in_flight(engine: LocalEngine) -> None:
    named: list[list[str]] = []

    class Names:
        def begin_step(self, request_ids: Iterable[str]) -> None:
            named.append(list(request_ids))

        def beat(self) -> None:
            pass

    engine.core.report_progress_to(cast(Heartbeat, Names()))
    first = engine.submit([1, 2, 3], max_tokens=2)
    engine.step()
    engine.step()
    second = engine.submit([1, 2, 3, 4], max_tokens=2)
    engine.step()
    assert named == [[first], [first, first], [first, second]], "its last token was in flight"
    engine.run()


def fail_on_bias(tokens: Iterable[int], of: Any) -> None:
    if any(token in biases for token in tokens for biases in of):
        raise RuntimeError("a defect that this request triggers")


@pytest.mark.parametrize("place", ["launch", "draw"])
def test_an_error_ends_the_request_that_causes_it_and_no_other(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = engine.generate(PROMPT)
    run, is_poisonous = engine.core.parts.runner.run, False

    def launch(sequences: Any, sampled: Any) -> StepOutput:
        biases = [each.request.submitted.sampling.logit_bias for each in sequences]
        if is_poisonous and place == "launch":
            fail_on_bias([7], biases)
        return run(sequences, sampled)

    def draw(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        if is_poisonous and place == "draw":
            fail_on_bias([7], [row.params.logit_bias for row in rows])
        return sample_tokens(logits, rows)

    monkeypatch.setattr(engine.core.parts.runner, "run", launch)
    monkeypatch.setattr("loraplex.engine.next_tokens.sample_tokens", draw)
    good = [engine.submit(PROMPT) for _ in range(2)]
    poison = engine.submit(PROMPT, logit_bias={7: 1.0})
    while not engine.answers[poison].token_ids:
        engine.step()
    is_poisonous = True
    engine.run()
    assert engine.tokens(good) == [expected] * 2
    error = engine.answers[poison].end.error
    assert error is not None
    assert error.code == "engine_error"
    assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks


def test_numbers_that_are_not_finite_end_their_request_and_no_other(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(PROMPT)
    run, is_poisonous = engine.core.parts.runner.run, False

    def spoil(sequences: Any, sampled: Any) -> StepOutput:
        output: StepOutput = run(sequences, sampled)
        logits = output.logits.clone()
        for row, sequence in enumerate(sequences):
            if is_poisonous and 7 in sequence.request.submitted.sampling.logit_bias:
                logits[row] = torch.nan
        return output_of(logits)

    monkeypatch.setattr(engine.core.parts.runner, "run", spoil)
    good = [engine.submit(PROMPT) for _ in range(2)]
    poison = engine.submit(PROMPT, logit_bias={7: 1.0})
    while len(engine.answers[poison].token_ids) < 2:
        engine.step()
    is_poisonous = True
    engine.run()
    assert engine.tokens(good) == [expected] * 2
    error = engine.answers[poison].end.error
    assert error is not None
    assert error.code == "numerical_error"
    assert len(engine.answers[poison].token_ids) < 5


def test_drafts_are_planned_when_nothing_is_in_flight_and_other_steps_overlap(
    tiny_base: Path, tmp_path: Path
) -> None:
    expected = open_engine(tiny_base, tmp_path, async_scheduling=False).generate(PROMPT)
    engine = open_engine(tiny_base, tmp_path, speculation=("ngram",))
    scheduler, control = engine.core.parts.scheduler, engine.core.parts.speculation._control
    request_id = engine.submit(PROMPT, max_tokens=len(expected))
    engine.step()
    assert not scheduler.can_plan_ahead, "nothing was decided yet"
    control._rest = range(100)
    numbers = count_launches(engine)
    engine.run()
    assert engine.tokens([request_id]) == [expected]
    assert numbers.count(2) > len(expected) // 2


def test_a_step_in_flight_is_read_before_somebody_is_preempted(
    tiny_base: Path, tmp_path: Path
) -> None:
    answers = []
    for is_async in (False, True):
        engine = open_engine(
            tiny_base,
            tmp_path,
            async_scheduling=is_async,
            kv_cache_bytes=12 * 8192,
            prefix_caching=False,
        )
        ids = [engine.submit([seed] * 9, max_tokens=60, ignore_eos=True) for seed in range(5)]
        engine.run()
        assert engine.core.stats().num_preemptions > 0
        answers.append(engine.tokens(ids))
        engine.close()
    assert answers[0] == answers[1]
