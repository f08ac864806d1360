"""Canaries that exceed their limits, over HTTP: they end by themselves, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

PROD, BLUE = "/v1/adapters/bot/aliases/prod", "/v1/adapters/bot/aliases/blue"
OFF = {"error_rate": None, "refusals": None, "length": None, "latency": None, "judge": None}
NUM_REQUESTS = 20
"""Of each version: the fewest that are compared."""


@pytest.fixture(scope="module")
def shared_owner(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    caller = server.make_caller("canary-owner")
    for folder in adapters[:2]:
        caller.push(folder, "bot")
    return caller


@pytest.fixture
def owner(shared_owner: Caller) -> Iterator[Caller]:
    """A tenant whose `bot` has two ready versions and no alias."""
    yield shared_owner
    for alias in (PROD, BLUE):
        shared_owner.http.delete(alias)


def split(caller: Caller, limits: dict[str, Any] | None, alias: str = PROD) -> httpx.Response:
    canary = {"version": 2, "percent": 50, "limits": limits}
    return caller.http.put(alias, json={"version": 1, "canary": canary})


def ask(caller: Caller, model: str, request_id: str, num_tokens: int) -> int:
    """Have so many tokens generated; the version that did."""
    body = {"model": model, "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True}
    headers = {"x-request-id": request_id}
    answer = caller.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-loraplex-adapter-version"])


def ids_by_version(caller: Caller, model: str) -> dict[int, list[str]]:
    """As many ids of requests as are compared, of each version of the split alias."""
    found: dict[int, list[str]] = {1: [], 2: []}
    for number in range(200):
        request_id = f"request-{number}"
        found[ask(caller, model, request_id, 1)].append(request_id)
        if min(map(len, found.values())) >= NUM_REQUESTS:
            break
    return found


def history(caller: Caller) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = caller.http.get(f"{PROD}/history").json()["data"]
    return changes


@pytest.mark.slow
def test_a_canary_with_other_lengths_ends_by_itself_and_says_why(owner: Caller) -> None:
    limits = {**OFF, "length": 1.5, "min_requests": NUM_REQUESTS}
    for alias in (PROD, BLUE):
        split(owner, None, alias)
    in_blue, in_prod = (ids_by_version(owner, f"bot@{alias}") for alias in ("blue", "prod"))
    known = {**limits, "judge_model": None, "judge_percent": 10.0}
    for alias in (PROD, BLUE):
        view = split(owner, limits, alias).json()
        assert view["canary"] == {"version": 2, "percent": 50, "limits": known}
    for version in (1, 2):
        for request_id in in_blue[version]:
            ask(owner, "bot@blue", request_id, 4)
        for request_id in in_prod[version]:
            ask(owner, "bot@prod", request_id, 12 if version == 2 else 2)

    wait_for(lambda: owner.http.get(PROD).json()["canary"] is None)
    last, before = history(owner)[:2]
    assert (last["action"], last["version"], last["changed_by"]) == ("rollback", 1, "system")
    assert last["reason"].startswith("length: 12.0 tokens in ")
    assert (before["reason"], before["canary"]["limits"]) == (None, known)
    (entry,) = (
        entry
        for entry in owner.http.get("/v1/audit").json()["data"]
        if entry["action"] == "alias.rollback"
    )
    assert entry["details"] == {"version": 1, "reason": last["reason"]}
    assert owner.http.get(BLUE).json()["canary"]["limits"] == known, "this one was equal"


def test_limits_that_are_left_out_have_defaults(owner: Caller) -> None:
    limits = split(owner, {}).json()["canary"]["limits"]
    assert limits == {
        "error_rate": 0.02,
        "refusals": 0.05,
        "length": 1.5,
        "latency": 1.5,
        "judge": 0.1,
        "judge_model": None,
        "judge_percent": 10.0,
        "min_requests": 100,
    }


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"error_rate": 1.0}, "canary.limits.error_rate"),
        ({"refusals": -0.1}, "canary.limits.refusals"),
        ({"length": 1.0}, "canary.limits.length"),
        ({"latency": 101.0}, "canary.limits.latency"),
        ({"judge": 0.5}, "canary.limits.judge"),
        ({"judge_percent": 0}, "canary.limits.judge_percent"),
        ({"judge_model": ""}, "canary.limits.judge_model"),
        ({"min_requests": 19}, "canary.limits.min_requests"),
    ],
)
def test_a_limit_out_of_its_range_is_refused(
    owner: Caller, limits: dict[str, Any], param: str
) -> None:
    answer = split(owner, limits)
    check_envelope(answer, "invalid_parameter", param)
    assert owner.http.get(PROD).status_code == 404
