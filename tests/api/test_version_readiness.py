"""Why a version is not ready: every reason, in the order of precedence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.manager import Tier
from loraplex.adapters.record import Failure, State
from loraplex.adapters.status import AdapterLoad
from loraplex.api.adapters.version_readiness import REASONS, VersionReadiness, judge
from loraplex.platform.adapters.models import AdapterVersion
from loraplex.platform.adapters.states import VersionState
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

MAX_PINS = 2
"""Of the server that all tests share."""
BASE = "sha256:base"
LOAD = AdapterLoad(
    key=AdapterKey("acme", "sha256:0"),
    state=State.HOST,
    tier=Tier.HOST,
    since_seconds=2.0,
    reason=None,
    retry_in_seconds=None,
    order=2,
    needed_bytes=500 << 20,
    free_bytes=600 << 20,
    largest_free_bytes=300 << 20,
    leased_bytes=700 << 20,
    is_pinned=False,
)


def version(state: VersionState = VersionState.READY, **fields: Any) -> AdapterVersion:
    return AdapterVersion(state=state, base_id=BASE, **fields)


def judged(
    of: AdapterVersion,
    load: AdapterLoad | None = None,
    *,
    base_id: str = BASE,
    is_engine_ready: bool = True,
    is_quarantined: bool = False,
    sees_machine: bool = True,
) -> VersionReadiness:
    return judge(
        "acme/bot@1",
        of,
        base_id=base_id,
        is_engine_ready=is_engine_ready,
        is_quarantined=is_quarantined,
        load=load,
        sees_machine=sees_machine,
    )


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.RESIDENT, "resident"),
        (State.FETCHING, "fetching"),
        (State.READING, "reading"),
        (State.HOST, "waiting_for_room"),
        (State.LOADING, "copying"),
        (State.FAILED, "load_failed"),
        ("stored", "not_loaded"),
    ],
)
def test_a_ready_version_is_where_the_engine_says(state: str, reason: str) -> None:
    readiness = judged(version(), replace(LOAD, state=state))
    assert readiness.reason == reason
    assert readiness.is_ready == (reason == "resident")
    assert readiness.is_servable


def test_what_the_catalog_knows_goes_before_what_the_engine_knows() -> None:
    resident = replace(LOAD, state=State.RESIDENT)
    rejected = version(
        VersionState.REJECTED, reason_code="no_effect", reason_message="Nothing moves."
    )
    for of, options, reason in (
        (rejected, {"base_id": "sha256:other", "is_engine_ready": False}, "rejected"),
        (version(VersionState.ATTESTING), {"is_quarantined": True}, "being_checked"),
        (version(VersionState.VALIDATED), {}, "being_checked"),
        (version(), {"base_id": "sha256:other", "is_quarantined": True}, "base_mismatch"),
        (version(), {"is_quarantined": True, "is_engine_ready": False}, "quarantined"),
        (version(), {"is_engine_ready": False}, "engine_unavailable"),
    ):
        readiness = judged(of, resident, **options)
        assert readiness.reason == reason
        assert not readiness.is_ready
        assert not readiness.is_servable
    assert "no_effect: Nothing moves." in judged(rejected).summary


def test_the_sentence_says_what_it_waits_for() -> None:
    words = judged(version(), LOAD).summary
    assert words.startswith("acme/bot@1: ")
    for figure in (
        "500.0 MiB of",
        "600.0 MiB are free",
        "block is 300.0 MiB",
        "700.0 MiB are in use",
        "2 other loads are",
    ):
        assert figure in words
    assert "1 other load is ahead" in judged(version(), replace(LOAD, order=1)).summary
    assert "ahead" not in judged(version(), replace(LOAD, order=0)).summary
    for state in (State.FETCHING, State.HOST):
        unsized = replace(LOAD, state=state, needed_bytes=None)
        assert "None" not in judged(version(), unsized).summary


def test_a_tenant_is_told_what_its_version_needs_and_nothing_of_the_machine() -> None:
    words = judged(version(), LOAD, sees_machine=False).summary
    assert "It needs 500.0 MiB of contiguous memory. 2 other loads are ahead." in words
    for figure in ("600", "300", "700", "free", "running"):
        assert figure not in words


def test_the_machines_figures_are_for_operators(
    server: ServerUnderTest, caller: Caller, adapters: list[Path]
) -> None:
    caller.push(adapters[0], "bot")
    path = "/v1/adapters/bot/versions/1/readiness"
    operators = {
        "authorization": f"Bearer {server.make_operator(f'of-{caller.slug}')}",
        "x-loraplex-tenant": caller.slug,
    }
    for answer, is_told in (
        (caller.http.get(path), False),
        (httpx.get(server.url + path, headers=operators), True),
    ):
        load = answer.json()["load"]
        figures = [load[name] for name in ("free_bytes", "largest_free_bytes", "leased_bytes")]
        assert [figure is not None for figure in figures] == [is_told] * 3


def test_a_failed_load_says_why_and_when_the_next_is() -> None:
    failed = replace(
        LOAD,
        state=State.FAILED,
        reason=Failure("store_unavailable", "The store is away."),
        retry_in_seconds=17.0,
    )
    readiness = judged(version(), failed)
    assert "store_unavailable: The store is away." in readiness.summary
    assert readiness.retry_after_seconds == 17.0


def test_the_documentation_has_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    for code, meaning in REASONS.items():
        assert f"| `{code}` | " in page
        assert meaning in page


def test_a_version_becomes_resident_by_a_prefetch(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot")
    path = "/v1/adapters/bot/versions/1"
    answer = caller.http.post(f"{path}/prefetch", json={"ttl_seconds": 600})
    assert answer.status_code == 202, answer.text
    (wish,) = answer.json()["wishes"]
    assert wish["kind"] == "prefetch"
    assert wish["expires_at"] > wish["created_at"]

    def resident() -> dict[str, Any]:
        found: dict[str, Any] = caller.http.get(f"{path}/readiness").json()
        return found if found["is_ready"] else {}

    standing = wait_for(resident)
    assert standing["reason"] == "resident"
    assert standing["tier"] == "device"
    assert standing["load"]["state"] == "resident"
    assert [entry["state"] for entry in standing["load"]["transitions"]][-1] == "resident"
    headers = caller.openai.completions.with_raw_response.create(
        model="bot", prompt="x", max_tokens=1
    ).headers
    assert headers["x-loraplex-tier"] == "device"


def test_a_pin_stands_until_it_is_taken_back(caller: Caller, adapters: list[Path]) -> None:
    caller.push(adapters[0], "bot")
    path = "/v1/adapters/bot/versions/1"
    for _ in range(2):
        pinned = caller.http.put(f"{path}/pin", json={"ttl_seconds": None})
        assert pinned.status_code == 202, pinned.text
        assert [(wish["kind"], wish["expires_at"]) for wish in pinned.json()["wishes"]] == [
            ("pin", None)
        ]
    wait_for(lambda: caller.http.get(f"{path}/readiness").json()["load"]["is_pinned"])
    assert caller.http.delete(f"{path}/pin").json()["wishes"] == []
    assert caller.http.delete(f"{path}/pin").status_code == 202
    wait_for(lambda: not caller.http.get(f"{path}/readiness").json()["load"]["is_pinned"])


def test_a_tenant_pins_only_so_many(caller: Caller, adapters: list[Path]) -> None:
    names = [f"bot-{n}" for n in range(MAX_PINS + 1)]
    for name in names:
        caller.push(adapters[0], name)
    answers = [caller.http.put(f"/v1/adapters/{name}/versions/1/pin", json={}) for name in names]
    assert {answer.status_code for answer in answers[:-1]} == {202}
    check_envelope(answers[-1], "too_many_pins")
    for name in names[:-1]:
        caller.http.delete(f"/v1/adapters/{name}/versions/1/pin")


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "pin"), ("POST", "prefetch")],
)
def test_a_wish_has_a_time_it_stands_and_a_ready_version(
    caller: Caller, adapters: list[Path], method: str, path: str
) -> None:
    caller.push(adapters[0], "bot")
    where = f"/v1/adapters/bot/versions/1/{path}"
    for seconds in (0, -1, 1e12):
        answer = caller.http.request(method, where, json={"ttl_seconds": seconds})
        check_envelope(answer, "invalid_parameter", "ttl_seconds")
    other = f"/v1/adapters/bot/versions/2/{path}"
    check_envelope(caller.http.request(method, other, json={}), "version_not_found")


def test_the_history_has_every_state_with_its_time(caller: Caller, adapters: list[Path]) -> None:
    version = caller.push(adapters[0], "bot")
    history = caller.http.get(version["history"]).json()["data"]
    assert [entry["state"] for entry in history] == ["validated", "attesting", "ready"]
    times = [entry["at"] for entry in history]
    assert times == sorted(times)
    assert times[-1] == version["state_changed_at"]
    assert {entry["reason"] for entry in history} == {None}
