"""Shadow traffic over HTTP: copies of requests are answered, compared, charged and never shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.evaluation.scorers import rouge_l
from loraplex.api.inference.held_charge import HeldCharge
from loraplex.api.inference.live_answers import (
    MAX_WAITING,
    MAX_WAITING_OF_TENANT,
    LiveAnswer,
    LiveAnswers,
)
from loraplex.api.inference.order import Order
from loraplex.api.inference.served_models import ServedModel
from loraplex.api.shadows.background import Background
from loraplex.api.shadows.shadows import Shadows
from loraplex.api.telemetry.metrics import Metrics
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.text.text_form import TextForm
from loraplex.platform.adapters.canary_sums import Split
from loraplex.platform.adapters.registry import AdapterRef, Shadow
from loraplex.platform.errors import DatabaseUnavailable
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

PROD = "/v1/adapters/bot/aliases/prod"
SHADOW = f"{PROD}/shadow"
PROMPTS = [f"prompt {number}" for number in range(5)]


@pytest.fixture(scope="module")
def shared_owner(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    caller = server.make_caller("shadow-owner")
    for folder in adapters:
        caller.push(folder, "bot")
    return caller


@pytest.fixture
def owner(shared_owner: Caller) -> Iterator[Caller]:
    """A tenant whose `bot@prod` is version 1, without a shadow."""
    shared_owner.http.put(PROD, json={"version": 1}).raise_for_status()
    yield shared_owner
    shared_owner.http.delete(PROD)


def ask(caller: Caller, model: str, prompt: str, **options: Any) -> tuple[str, str]:
    """The text, and the version that answered."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
    answer = caller.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    version = answer.headers["x-loraplex-adapter-version"]
    return answer.json()["choices"][0]["text"], version


def set_shadow(caller: Caller, version: int = 2, percent: float = 100) -> None:
    answer = caller.http.put(SHADOW, json={"version": version, "percent": percent})
    assert answer.status_code == 200, answer.text


def shown(caller: Caller) -> dict[str, Any]:
    view: dict[str, Any] = caller.http.get(SHADOW).json()
    return view


def usage_of(caller: Caller, version: int) -> tuple[int, int]:
    """Requests and output tokens of a version in the ledger."""
    rows = caller.http.get("/v1/usage", params={"group_by": "version"}).json()["data"]
    found = [row for row in rows if row.get("version") == version]
    return sum(r["requests"] for r in found), sum(r["completion_tokens"] for r in found)


def test_each_copy_is_compared_with_the_live_answer(owner: Caller) -> None:
    expected = {prompt: ask(owner, "bot@2", prompt)[0] for prompt in PROMPTS}
    before = usage_of(owner, 2)
    set_shadow(owner)
    live = {prompt: ask(owner, "bot@prod", prompt) for prompt in PROMPTS}
    assert {version for _, version in live.values()} == {"1"}, "the caller sees its own version"
    wait_for(lambda: shown(owner)["compared"] == len(PROMPTS))
    view = shown(owner)
    scores = [rouge_l(expected[prompt], live[prompt][0]) for prompt in PROMPTS]
    assert view["equal"] == sum(expected[prompt] == live[prompt][0] for prompt in PROMPTS)
    assert view["rouge_l"] == pytest.approx(sum(scores) / len(scores))
    assert sum(view["rouge_l_counts"]) == len(PROMPTS)
    assert view["length_ratio"] == pytest.approx(1.0, rel=0.5)
    assert (view["errors"], view["version"], view["percent"]) == (0, 2, 100)
    after = usage_of(owner, 2)
    assert after[0] - before[0] == len(PROMPTS), "and is charged to its own version"
    assert after[1] > before[1]


def test_only_a_share_is_copied(owner: Caller) -> None:
    set_shadow(owner, percent=40)
    for number in range(40):
        ask(owner, "bot@prod", str(number), max_tokens=1)
    set_shadow(owner, version=3)  # from now on all; these come behind the others in the queue
    wait_for(lambda: ask(owner, "bot@prod", "x", max_tokens=1) and shown(owner)["compared"] > 0)
    num_copied = usage_of(owner, 2)[0]
    assert 0 < num_copied < 40 + len(PROMPTS) * 2


def test_several_choices_and_pinned_versions_have_no_copy(owner: Caller) -> None:
    set_shadow(owner)
    ask(owner, "bot@prod", "x", n=2, temperature=1)
    ask(owner, "bot@1", "x")
    ask(owner, "bot@prod", "x")
    wait_for(lambda: shown(owner)["compared"] > 0)
    assert shown(owner)["compared"] == 1


def test_a_shadow_is_set_shown_and_ended(owner: Caller) -> None:
    check_envelope(owner.http.get(SHADOW), "shadow_not_found")
    set_shadow(owner, percent=2.5)
    view = shown(owner)
    assert (view["adapter"], view["alias"], view["compared"]) == ("bot", "prod", 0)
    assert (view["rouge_l"], view["length_ratio"]) == (None, None)
    assert owner.http.delete(SHADOW).status_code == 204
    check_envelope(owner.http.delete(SHADOW), "shadow_not_found")
    actions = [entry["action"] for entry in owner.http.get("/v1/audit").json()["data"]]
    assert actions[:2] == ["shadow.remove", "shadow.set"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"version": 1, "percent": 5}, "invalid_parameter", "version"),
        ({"version": 9, "percent": 5}, "version_not_found", None),
        ({"version": 2, "percent": 0}, "invalid_parameter", "percent"),
        ({"version": 2, "percent": 101}, "invalid_parameter", "percent"),
        ({"version": 2}, "invalid_parameter", "percent"),
    ],
)
def test_what_cannot_be_a_shadow_is_refused(
    owner: Caller, body: dict[str, Any], code: str, param: str | None
) -> None:
    check_envelope(owner.http.put(SHADOW, json=body), code, param)


def answer_of(tenant_id: str, number: int = 0) -> LiveAnswer[Any]:
    order = SimpleNamespace(principal=SimpleNamespace(tenant_id=tenant_id))
    return LiveAnswer(cast(Order, order), None, "", number)


def test_answers_beyond_the_queue_are_dropped_and_counted() -> None:
    async def fill() -> None:
        metrics = Metrics(lambda: None)
        answers = LiveAnswers(metrics).shadowed
        for number in range(MAX_WAITING + 3):
            answers.offer(answer_of(f"tenant {number}", number))
        assert metrics.shadow_requests.labels("dropped")._value.get() == 3
        taken = [(await answers.take()).num_tokens for _ in range(MAX_WAITING)]
        assert taken == list(range(MAX_WAITING))

    asyncio.run(fill())


def test_answers_of_one_tenant_leave_room_for_others() -> None:
    async def fill() -> None:
        metrics = Metrics(lambda: None)
        answers = LiveAnswers(metrics).judged
        dropped = metrics.canary_comparisons.labels("dropped")._value
        for _ in range(MAX_WAITING_OF_TENANT + 3):
            answers.offer(answer_of("acme"))
        assert dropped.get() == 3
        for _ in range(MAX_WAITING - MAX_WAITING_OF_TENANT):
            answers.offer(answer_of("other"))
        assert dropped.get() == 3
        await answers.take()
        answers.offer(answer_of("acme"))
        assert dropped.get() == 3, "a taken one is not counted any more"

    asyncio.run(fill())


# --- faults ---------------------------------------------------------------------------------------


class Failing:
    """Stands in for inference and the database: it starts nothing, and notes what is added."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.num_added = 0

    async def start(self, order: Order) -> None:
        raise self._failure

    async def write(self, tenant_id: str, change: object) -> None:
        self.num_added += 1

    async def drop(self, held: HeldCharge) -> None:
        assert held.account is None


@pytest.mark.parametrize(
    ("failure", "outcome", "num_added"),
    [
        (ApiError("adapter_load_failed"), "failed", 1),
        (ApiError("engine_unavailable"), "dropped", 0),
        (ApiError("adapter_loading"), "dropped", 0),
        (ApiError("classifier_only"), "dropped", 0),
        (DatabaseUnavailable(), "dropped", 0),
        (ValueError("a defect"), "dropped", 0),
    ],
)
def test_a_copy_that_fails_stops_no_other(failure: Exception, outcome: str, num_added: int) -> None:
    split = Split("acme", "adapter", "bot", "prod", 1)
    version = cast(AdapterRef, SimpleNamespace(pinned="acme/bot@2", version=2))
    order = Order(
        request_id="r",
        arrived_at=0.0,
        principal=cast(Any, SimpleNamespace(tenant_id="acme")),
        model=ServedModel("acme/bot@1", None),
        prompts=[[1]],
        num_choices=1,
        sampling=SamplingParams(),
        text=TextForm(),
    )

    async def fail() -> None:
        failing, metrics = Failing(failure), Metrics(lambda: None)
        answers = LiveAnswers(metrics).shadowed
        shadows = Shadows(
            answers,
            background=Background(cast(Any, failing), cast(Any, failing)),
            control_plane=cast(Any, failing),
            metrics=metrics,
        )
        for _ in range(5):
            answers.offer(LiveAnswer(order, Shadow(version, 100.0, split), "", 1))
        shadows.start()
        counted = metrics.shadow_requests.labels(outcome)._value
        async with asyncio.timeout(10):
            while counted.get() < 5:
                await asyncio.sleep(0)
        await shadows.close()
        assert failing.num_added == 5 * num_added

    asyncio.run(fail())
