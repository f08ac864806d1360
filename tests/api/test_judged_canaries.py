"""Canaries that a judge compares, over HTTP: the model of the judge is real, and its verdicts are
asked directly first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import select

from loraplex.api.evaluation.judge import Comparison
from loraplex.platform.adapters.canary_models import CanaryCounts
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest, serving
from support.waiting import wait_for

PROD, BLUE = "/v1/adapters/bot/aliases/prod", "/v1/adapters/bot/aliases/blue"
BASE = "tiny"
OFF = {"error_rate": None, "refusals": None, "length": None, "latency": None}
NUM_COMPARISONS = 20
LIMITS = {
    **OFF,
    "judge_model": BASE,
    "judge_percent": 100.0,
    "min_requests": NUM_COMPARISONS,
}


class Preference(NamedTuple):
    """A prompt to which the judge prefers one version's answer in both orders."""

    prompt: str
    better: int
    worse: int


def text_of(caller: Caller, model: str, prompt: str, **options: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
    answer = caller.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def verdict(caller: Caller, pair: Comparison) -> str:
    answer = caller.http.post("/v1/chat/completions", json=pair.line("x", BASE).body)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def find_preference(caller: Caller) -> Preference:
    better_of = {("A", "B"): 1, ("B", "A"): 2}
    for number in range(200):
        prompt = f"prompt {number}"
        first, second = (text_of(caller, f"bot@{version}", prompt) for version in (1, 2))
        pair = Comparison(prompt, first, second)
        better = better_of.get((verdict(caller, pair), verdict(caller, pair.swapped)))
        if better is not None:
            return Preference(prompt, better, 3 - better)
    raise AssertionError("the judge prefers nothing")


def split(
    caller: Caller, main: int, canary: int, limits: dict[str, Any], alias: str = PROD
) -> httpx.Response:
    target = {"version": main, "canary": {"version": canary, "percent": 50, "limits": limits}}
    return caller.http.put(alias, json=target)


def num_judged(server: ServerUnderTest, caller: Caller, alias: str) -> int:
    """The comparisons that are in the database."""
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        found = session.scalars(select(CanaryCounts.num_judged).where(CanaryCounts.alias == alias))
        num = sum(found)
    database.close()
    return num


def num_requests(caller: Caller) -> int:
    """All requests in the ledger."""
    rows = caller.http.get("/v1/usage").json()["data"]
    return sum(row["requests"] for row in rows)


@pytest.fixture(scope="module")
def shared_owner(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    caller = server.make_caller("judge-owner")
    for folder in adapters[:2]:
        caller.push(folder, "bot")
    return caller


@pytest.fixture
def owner(shared_owner: Caller) -> Iterator[Caller]:
    """A tenant whose `bot` has two ready versions and no alias."""
    yield shared_owner
    for alias in (PROD, BLUE):
        shared_owner.http.delete(alias)


@pytest.fixture(scope="module")
def preference(shared_owner: Caller) -> Preference:
    return find_preference(shared_owner)


@pytest.mark.slow
def test_the_canary_ends_whose_answers_the_judge_finds_worse(
    server: ServerUnderTest, owner: Caller, preference: Preference
) -> None:
    prompt, better, worse = preference
    assert split(owner, better, worse, LIMITS).status_code == 200
    split(owner, worse, better, LIMITS, BLUE).raise_for_status()

    for _ in range(NUM_COMPARISONS + 4):
        for alias in ("blue", "prod"):
            text_of(owner, f"bot@{alias}", prompt)
    # Copies run while nobody asks.
    wait_for(lambda: owner.http.get(PROD).json()["canary"] is None, seconds=120)
    last = owner.http.get(f"{PROD}/history").json()["data"][0]
    assert (last["action"], last["version"], last["changed_by"]) == ("rollback", better, "system")
    assert last["reason"].startswith("judge: the canary won 0.00 % of ")
    assert last["reason"].endswith(" comparisons, a tie counting half; limit 0.1 below one half")
    wait_for(lambda: num_judged(server, owner, "blue") >= NUM_COMPARISONS, seconds=60)
    assert owner.http.get(BLUE).json()["canary"]["version"] == better, "the judge prefers it"


@pytest.mark.slow
def test_the_other_answer_and_both_verdicts_are_charged(
    server: ServerUnderTest, owner: Caller, preference: Preference
) -> None:
    split(owner, 1, 2, LIMITS).raise_for_status()
    before = num_requests(owner)
    text_of(owner, "bot@prod", preference.prompt)
    wait_for(lambda: num_judged(server, owner, "prod") == 1)
    assert num_requests(owner) - before == 4


@pytest.mark.slow
def test_what_is_not_to_be_stored_is_not_judged(
    server: ServerUnderTest, owner: Caller, preference: Preference
) -> None:
    split(owner, 1, 2, LIMITS).raise_for_status()
    before = num_requests(owner)
    text_of(owner, "bot@prod", preference.prompt, store=False)
    text_of(owner, "bot@prod", preference.prompt)
    wait_for(lambda: num_judged(server, owner, "prod") > 0)
    assert num_judged(server, owner, "prod") == 1
    assert num_requests(owner) - before == 1 + 4


@pytest.mark.slow
def test_a_key_for_the_adapter_alone_is_enough_for_its_requests_to_be_judged(
    server: ServerUnderTest, owner: Caller, preference: Preference
) -> None:
    split(owner, 1, 2, LIMITS).raise_for_status()
    grant = {"name": "bot only", "scopes": ["infer"], "adapters": ["bot"]}
    key = owner.http.post("/v1/keys", json=grant).json()["key"]
    body = {"model": "bot@prod", "prompt": preference.prompt, "max_tokens": 8, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    assert owner.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    wait_for(lambda: num_judged(server, owner, "prod") == 1)


def test_a_judge_that_the_caller_cannot_use_is_refused(owner: Caller) -> None:
    def put(judge: str, key: str | None = None) -> httpx.Response:
        canary = {"version": 2, "percent": 50, "limits": {**LIMITS, "judge_model": judge}}
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return owner.http.put(PROD, json={"version": 1, "canary": canary}, headers=headers)

    check_envelope(put("nobody"), "model_not_found")
    check_envelope(put("bot@1:9"), "invalid_composition")
    check_envelope(put("bot@1+bot@2"), "invalid_parameter", "canary.limits.judge_model")
    grant = {"name": "bot only", "scopes": ["adapters:write", "infer"], "adapters": ["bot"]}
    key = owner.http.post("/v1/keys", json=grant).json()["key"]
    check_envelope(put(BASE, key), "model_not_found")
    assert put("bot@1", key).status_code == 200


@pytest.mark.slow
def test_a_killed_server_loses_no_canary(
    tiny_base: Path, tmp_path: Path, adapters: list[Path]
) -> None:
    name = ("--served-model-name", BASE)
    with serving(tiny_base, tmp_path, *name) as first:
        caller = first.make_caller("acme")
        for folder in adapters[:2]:
            caller.push(folder, "bot")
        prompt, better, worse = find_preference(caller)
        limits = {**LIMITS, "min_requests": 2 * NUM_COMPARISONS}
        split(caller, better, worse, limits).raise_for_status()
        for _ in range(NUM_COMPARISONS):  # too few to end it
            text_of(caller, "bot@prod", prompt)
        wait_for(lambda: num_judged(first, caller, "prod") > 0, seconds=60)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
    with serving(tiny_base, tmp_path, *name) as server:
        again = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
        server.callers.append(again)
        assert num_judged(server, again, "prod") > 0
        assert again.http.get(PROD).json()["canary"]["limits"]["judge_model"] == BASE
        for _ in range(2 * NUM_COMPARISONS):
            text_of(again, "bot@prod", prompt)
        wait_for(lambda: again.http.get(PROD).json()["canary"] is None, seconds=120)
        reason = again.http.get(f"{PROD}/history").json()["data"][0]["reason"]
        num_compared = int(reason.split(" % of ")[1].split(" ")[0].replace(",", ""))
        assert num_compared >= 2 * NUM_COMPARISONS
