"""Gates of aliases on a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.platform.keys.principal import Scope
from support.envelopes import check_envelope
from support.evaluations import ended, expecting, put_set
from support.server import Caller

ALIAS = "/v1/adapters/bot/aliases/prod"
PROMPTS = ["one", "two two", "three"]


@pytest.fixture
def owner(caller: Caller, adapters: list[Path]) -> Caller:
    """A tenant with `bot@1`, the version of `prod`, and `bot@2`."""
    caller.push(adapters[0], "bot", aliases=["prod"])
    caller.push(adapters[1], "bot")
    return caller


def set_gate(caller: Caller, model: str) -> None:
    """A gate with cases that this model answers as expected."""
    put_set(caller, expecting(caller, model, PROMPTS))
    answer = caller.http.put(f"{ALIAS}/gate", json={"golden_set": "golden"})
    assert answer.status_code == 200, answer.text
    view = answer.json()
    assert (view["alias"], view["golden_set"], view["tolerance"]) == ("prod", "golden", None)
    assert caller.http.get(f"{ALIAS}/gate").json() == view


def move(caller: Caller, version: int, **more: Any) -> httpx.Response:
    return caller.http.put(ALIAS, json={"version": version, **more})


def evaluations(caller: Caller) -> list[str]:
    found = caller.http.get("/v1/adapters/bot/evaluations").json()["data"]
    return [each["id"] for each in found]


def test_an_alias_moves_when_the_evaluation_that_its_gate_started_has_succeeded(
    owner: Caller,
) -> None:
    set_gate(owner, "bot@2")
    error = check_envelope(move(owner, 2), "gate_not_passed", "version")
    (started,) = evaluations(owner)
    assert f"The evaluation `{started}` was started." in error["message"]
    ended(owner, started)
    assert move(owner, 2).json()["version"] == 2
    change = owner.http.get(f"{ALIAS}/history").json()["data"][0]
    assert (change["evaluation"], change["override"]) == (started, None)
    assert owner.http.post(f"{ALIAS}/rollback").json()["version"] == 1
    assert evaluations(owner) == [started]


@pytest.mark.slow
def test_a_regression_is_explained_and_can_be_overridden(owner: Caller) -> None:
    set_gate(owner, "bot@1")
    check_envelope(
        move(owner, 1, canary={"version": 2, "percent": 5}), "gate_not_passed", "version"
    )
    (started,) = evaluations(owner)
    again = check_envelope(move(owner, 2), "gate_not_passed", "version")
    assert f"The evaluation `{started}` runs." in again["message"], "none is started twice"
    ended(owner, started)
    refused = check_envelope(move(owner, 2), "gate_refused")
    assert "all -" in refused["message"]
    assert started in refused["message"]
    assert owner.http.get(ALIAS).json()["version"] == 1
    assert move(owner, 2, override="outage 4711").json()["version"] == 2
    change = owner.http.get(f"{ALIAS}/history").json()["data"][0]
    assert (change["evaluation"], change["override"]) == (None, "outage 4711")
    audit = owner.http.get("/v1/audit?limit=1").json()["data"][0]
    assert audit["details"]["override"] == "outage 4711"
    assert owner.http.delete(f"{ALIAS}/gate").status_code == 204
    check_envelope(owner.http.get(f"{ALIAS}/gate"), "gate_not_found")
    assert move(owner, 1).status_code == 200


@pytest.mark.slow
def test_a_push_leaves_a_gated_alias_where_it_is(owner: Caller, adapters: list[Path]) -> None:
    put_set(owner, [{"id": "a", "prompt": "x", "expected": "y"}])
    owner.http.put(f"{ALIAS}/gate", json={"golden_set": "golden"})
    version = owner.push(adapters[2], "bot", aliases=["prod", "next"])
    assert version["state"] == "ready"
    aliases = owner.http.get("/v1/adapters/bot").json()["aliases"]
    assert aliases == {"next": 3, "prod": 1}
    check_envelope(owner.http.delete("/v1/adapters/bot/golden-sets/golden"), "golden_set_in_use")


def test_a_key_that_may_not_infer_starts_no_evaluation(owner: Caller) -> None:
    put_set(owner, [{"id": "a", "prompt": "x", "expected": "y"}])
    owner.http.put(f"{ALIAS}/gate", json={"golden_set": "golden"})
    body = {"name": "x", "scopes": [Scope.ADAPTERS_WRITE]}
    key = owner.http.post("/v1/keys", json=body).json()["key"]
    answer = owner.http.put(ALIAS, json={"version": 2}, headers={"authorization": f"Bearer {key}"})
    message = check_envelope(answer, "gate_not_passed", "version")["message"]
    assert "None was started: An evaluation requires the scope `infer` too." in message
    assert evaluations(owner) == []
