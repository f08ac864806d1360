"""The judge of canaries with scripted models: both orders, no evidence from failures, reasoning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.inference.live_answers import LiveAnswer, LiveAnswers, rival_of, shadow_of
from loraplex.api.inference.order import Order
from loraplex.api.inference.prompts import Prompts
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.samples.open_sample import OpenSample
from loraplex.api.shadows.background import Answered, copy_of
from loraplex.api.shadows.canary_judge import CanaryJudge
from loraplex.api.telemetry.metrics import Metrics
from loraplex.api.tools.reasoning import Reasoning
from loraplex.api.tools.reasoning_format import THINK, Beginning
from loraplex.engine.messages import Pooling
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.adapters.canary_sums import Arm, Split
from loraplex.platform.adapters.registry import AdapterRef, Rival, Shadow
from loraplex.platform.errors import DatabaseUnavailable
from loraplex.platform.keys.principal import Principal
from loraplex.platform.tenants.models import Tenant
from support.stored_responses import principal_of

SPLIT = Split("acme", "adapter", "bot", "prod", 1)
TENANT = Tenant(id="acme", slug="acme")
PROMPT = "What is the capital of France?"

Judge = Callable[[str, str], str]
"""The verdict about two answers."""


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Tokenizer:
    return Tokenizer(tiny_base)


def version(number: int, **fields: Any) -> AdapterRef:
    known = {
        "adapter_id": "adapter",
        "alias": "prod",
        "version": number,
        "pinned": f"acme/bot@{number}",
        "added_tokens": (),
        "shadow": None,
        "rival": None,
        "arm": None,
    }
    return cast(AdapterRef, SimpleNamespace(**{**known, **fields}))


def live_version(*, is_canary: bool = True, percent: float = 100.0) -> AdapterRef:
    rival = Rival(version(1), percent, "judge")
    return version(2, rival=rival, arm=Arm(SPLIT, is_canary))


def order_for(adapter: AdapterRef | None, prompt: list[int], **fields: Any) -> Order:
    known: dict[str, Any] = {
        "request_id": "r",
        "arrived_at": 0.0,
        "principal": principal_of(TENANT, adapters=frozenset({"bot"})),
        "model": ServedModel("acme/bot@2", adapter),
        "prompts": [prompt],
        "num_choices": 1,
        "sampling": SamplingParams(),
        "text": TextForm(),
    }
    return Order(**{**known, **fields})


class Scripted:
    """Stands in for inference, the background and the watch."""

    def __init__(self, tokenizer: Tokenizer, judge: Judge, answer: str | Exception) -> None:
        engine = SimpleNamespace(info=SimpleNamespace(max_model_len=4096))
        self.prompts = Prompts(tokenizer, cast(Any, engine))
        self.models = self
        self.scores: list[float] = []
        self.questions: list[str] = []
        self._tokenizer = tokenizer
        self._judge = judge
        self._answer = answer

    async def resolve(self, principal: Principal, model: str, *, request_id: str) -> ServedModel:
        assert model == "judge"
        assert principal.may_use("judge")
        return ServedModel("judge", None)

    def tokenizer_of(self, model: ServedModel) -> Tokenizer:
        return self._tokenizer

    async def answer(self, order: Order) -> Answered:
        if order.request_id.startswith("shadow-"):
            assert order.model.name == "acme/bot@1"
            if isinstance(self._answer, Exception):
                raise self._answer
            return Answered(self._answer, 1)
        question = self._tokenizer.decode(order.prompts[0])
        self.questions.append(question)
        _, _, answers = question.partition("Answer A:\n")
        first, _, second = answers.partition("\n\nAnswer B:\n")
        return Answered(self._judge(first, second), 1)

    def add_score(self, split: Split, score: float) -> None:
        assert split == SPLIT
        self.scores.append(score)


def judge_once(
    tokenizer: Tokenizer,
    judge: Judge,
    *,
    live: str,
    other: str | Exception,
    is_canary: bool = True,
    **fields: Any,
) -> tuple[str, Scripted]:
    """The outcome for one live answer, and what was seen of it."""
    scripted = Scripted(tokenizer, judge, other)
    metrics = Metrics(lambda: None)
    adapter = live_version(is_canary=is_canary)
    assert adapter.rival is not None
    order = order_for(adapter, tokenizer.encode(PROMPT), **fields)

    async def run() -> str:
        queue = LiveAnswers(metrics).judged
        judge = CanaryJudge(
            queue,
            inference=cast(Any, scripted),
            background=cast(Any, scripted),
            canary_watch=cast(Any, scripted),
            metrics=metrics,
        )
        assert adapter.rival is not None
        queue.offer(LiveAnswer(order, adapter.rival, live, 1))
        judge.start()
        outcomes = ("judged", "failed", "dropped")
        counters = {each: metrics.canary_comparisons.labels(each)._value for each in outcomes}
        async with asyncio.timeout(20):
            while not any(counter.get() for counter in counters.values()):
                await asyncio.sleep(0.01)
        await judge.close()
        return next(outcome for outcome, counter in counters.items() if counter.get())

    try:
        return asyncio.run(run()), scripted
    finally:
        scripted.prompts.close()


def prefers_paris(first: str, second: str) -> str:
    if ("Paris" in first) == ("Paris" in second):
        return "tie"
    return "A" if "Paris" in first else "B"


def always_first(first: str, second: str) -> str:
    return "A"


@pytest.mark.parametrize(
    ("live", "other", "is_canary", "score"),
    [
        ("Paris.", "Rome.", True, 1.0),
        ("Rome.", "Paris.", True, 0.0),
        ("Paris.", "Rome.", False, 0.0),
        ("Rome.", "Paris.", False, 1.0),
        ("Paris.", "It is Paris.", True, 0.5),
    ],
)
def test_the_better_answer_wins_whichever_version_was_live(
    tokenizer: Tokenizer, live: str, other: str, is_canary: bool, score: float
) -> None:
    outcome, seen = judge_once(
        tokenizer, prefers_paris, live=live, other=other, is_canary=is_canary
    )
    assert (outcome, seen.scores) == ("judged", [score])
    assert len(seen.questions) == 2
    assert all(PROMPT in question for question in seen.questions)


def test_a_judge_that_prefers_a_place_prefers_no_version(tokenizer: Tokenizer) -> None:
    assert judge_once(tokenizer, always_first, live="x", other="y")[1].scores == [0.5]


def test_equal_answers_are_a_tie_without_a_request(tokenizer: Tokenizer) -> None:
    _, seen = judge_once(tokenizer, always_first, live="Paris.", other="Paris.")
    assert (seen.scores, seen.questions) == ([0.5], [])


def test_the_judge_does_not_read_reasoning(tokenizer: Tokenizer) -> None:
    _, seen = judge_once(
        tokenizer,
        prefers_paris,
        live="<think>Not Paris?</think>Rome.",
        other="<think>Rome?</think>Paris.",
        reasoning=Reasoning(THINK, Beginning.EITHER),
    )
    assert seen.scores == [0.0]
    assert not any("think" in question for question in seen.questions)


@pytest.mark.parametrize(
    "failure",
    [ApiError("engine_unavailable"), ApiError("adapter_load_failed"), DatabaseUnavailable()],
)
def test_a_version_that_does_not_answer_is_no_evidence(
    tokenizer: Tokenizer, failure: Exception
) -> None:
    outcome, seen = judge_once(tokenizer, prefers_paris, live="Paris.", other=failure)
    assert (outcome, seen.scores, seen.questions) == ("failed", [], [])


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_judge_that_fails_in_either_order_is_no_evidence(
    tokenizer: Tokenizer, failing_call: int
) -> None:
    calls = []

    def judge(first: str, second: str) -> str:
        calls.append(first)
        if len(calls) == failing_call:
            raise ApiError("context_length_exceeded")
        return "A"

    outcome, seen = judge_once(tokenizer, judge, live="x", other="y")
    assert (outcome, seen.scores, len(calls)) == ("failed", [], failing_call)


def test_a_verdict_that_was_cut_off_is_no_evidence(tokenizer: Tokenizer) -> None:
    outcome, seen = judge_once(tokenizer, lambda first, second: "ti", live="x", other="y")
    assert (outcome, seen.scores) == ("failed", [])


def test_a_defect_ends_no_other_comparison(tokenizer: Tokenizer) -> None:
    outcome, seen = judge_once(tokenizer, always_first, live="x", other=TypeError("a defect"))
    assert (outcome, seen.scores) == ("dropped", [])


# --- which orders ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"is_private": True},
        {"num_choices": 2},
        {"prompts": [[1], [2]]},
        {"pooling": Pooling.LAST},
        {"held_charge": object()},
        {"model": ServedModel("tiny", None)},
        {"model": ServedModel("acme/bot@2", version(2))},
        {"model": ServedModel("acme/bot@2", live_version(), composition=cast(Any, object()))},
        {"model": ServedModel("acme/bot@2", live_version(percent=1e-9))},
    ],
)
def test_what_is_not_judged(fields: dict[str, Any]) -> None:
    assert rival_of(order_for(live_version(), [1])) is not None
    assert rival_of(order_for(live_version(), [1], **fields)) is None


def test_a_version_with_other_tokens_answers_no_copy() -> None:
    other = version(1, added_tokens=("x",))
    adapter = version(2, rival=Rival(other, 100.0, "judge"), shadow=Shadow(other, 100.0, SPLIT))
    order = order_for(adapter, [1])
    assert (rival_of(order), shadow_of(order)) == (None, None)


def test_the_drawn_share_is_that_of_the_alias() -> None:
    adapter = live_version(percent=30.0)
    drawn = [
        rival_of(order_for(adapter, [1], request_id=str(number))) is not None
        for number in range(1000)
    ]
    assert 240 < sum(drawn) < 360


def test_no_sample_is_kept_of_a_copy() -> None:
    sample = OpenSample("r", version(2), cast(Any, None), lambda sample: None)
    copied = copy_of(order_for(live_version(), [1], sample=sample), version(1))
    assert copied.sample is None
