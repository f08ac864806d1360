"""Aliases over HTTP: set, canary, rollback, and their history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api.client.api_client import ApiClient
from loraplex.api.client.local_adapter import read_adapter
from loraplex.api.client.progress import Progress
from loraplex.api.client.uploads import push_adapter, wait_until_settled
from support.browser import signed_in_user
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest

PROD = "/v1/adapters/bot/aliases/prod"


@pytest.fixture
def fresh_owner(caller: Caller, adapters: list[Path]) -> Caller:
    """A tenant of the test's own, whose `bot` has two ready versions and never had an alias."""
    for folder in adapters[:2]:
        caller.push(folder, "bot")
    return caller


@pytest.fixture(scope="module")
def shared_owner(server: ServerUnderTest, adapters: list[Path]) -> Caller:
    caller = server.make_caller("alias-owner")
    for folder in adapters:
        caller.push(folder, "bot")
    return caller


@pytest.fixture
def owner(shared_owner: Caller) -> Iterator[Caller]:
    """A tenant whose `bot` has three ready versions and no alias."""
    yield shared_owner
    shared_owner.http.delete(PROD)


def ask(caller: Caller, model: str = "bot", request_id: str | None = None) -> Any:
    """The raw answer of the official client."""
    headers = {} if request_id is None else {"X-Request-Id": request_id}
    return caller.openai.completions.with_raw_response.create(
        model=model, prompt="x", max_tokens=1, extra_headers=headers
    )


def answering_version(caller: Caller, request_id: str) -> int:
    return int(ask(caller, request_id=request_id).headers["x-loraplex-adapter-version"])


def canary(version: int, percent: float) -> dict[str, Any]:
    return {"version": version, "percent": percent}


def split(caller: Caller, percent: float) -> dict[str, Any]:
    body = {"version": 1, "canary": canary(2, percent)}
    answer = caller.http.put(PROD, json=body)
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


def test_a_split_alias_shows_its_canary_everywhere(owner: Caller) -> None:
    view = split(owner, 12.5)
    assert view["version"] == 1
    assert view["canary"] == {"version": 2, "percent": 12.5, "limits": None}
    assert owner.http.get("/v1/adapters/bot/aliases").json()["data"] == [view]
    shown = owner.http.get("/v1/adapters/bot").json()
    assert shown["aliases"] == {"prod": 1}
    assert shown["canaries"] == {"prod": {"version": 2, "percent": 12.5}}
    (listed,) = owner.http.get("/v1/adapters").json()["data"]
    assert (listed["aliases"], listed["canaries"]) == (shown["aliases"], shown["canaries"])


def test_the_same_request_id_meets_the_same_version_and_both_are_met(owner: Caller) -> None:
    split(owner, 50)
    first = {f"conversation-{n}": answering_version(owner, f"conversation-{n}") for n in range(24)}
    again = {request_id: answering_version(owner, request_id) for request_id in first}
    assert first == again
    assert set(Counter(first.values())) == {1, 2}


def test_a_grown_canary_keeps_whom_it_had(owner: Caller) -> None:
    ids = [f"conversation-{n}" for n in range(16)]
    split(owner, 30)
    before = {request_id for request_id in ids if answering_version(owner, request_id) == 2}
    split(owner, 70)
    after = {request_id for request_id in ids if answering_version(owner, request_id) == 2}
    assert before < after


@pytest.mark.parametrize("unusable", ["", "a b", "ä", "x" * 129, "a/b"])
def test_an_id_of_another_form_is_as_good_as_none(owner: Caller, unusable: str) -> None:
    split(owner, 50)
    versions = set()
    for _ in range(40):
        answer = owner.http.post(
            "/v1/completions",
            json={"model": "bot", "prompt": "x", "max_tokens": 1},
            headers=[(b"x-request-id", unusable.encode())],
        )
        versions.add(answer.headers["x-loraplex-adapter-version"])
        if len(versions) == 2:
            return
    raise AssertionError(f"40 requests under {unusable!r} all met {versions}")


def test_the_official_client_reads_which_version_answered_and_how(owner: Caller) -> None:
    split(owner, 99)
    raw = ask(owner, request_id="mine")
    version = raw.headers["x-loraplex-adapter-version"]
    assert raw.parse().model == raw.headers["x-loraplex-adapter"] == f"{owner.slug}/bot@{version}"
    listed = owner.http.get("/v1/adapters/bot/versions").json()["data"]
    digests = {str(entry["version"]): entry["digest"] for entry in listed}
    assert raw.headers["x-loraplex-digest"] == digests[version]
    assert raw.headers["x-loraplex-alias"] == "prod"
    assert raw.headers["x-loraplex-canary"] == str(version == "2").lower()
    assert raw.headers["x-loraplex-tier"] in {"device", "host", "disk", "store"}
    assert int(raw.headers["x-loraplex-load-ms"]) >= 0
    assert int(raw.headers["x-loraplex-wait-ms"]) >= 0
    assert raw.headers["x-request-id"] != "mine"


def test_a_resident_adapter_was_loaded_in_no_time(owner: Caller) -> None:
    ask(owner, "bot@3")
    headers = ask(owner, "bot@3").headers
    assert headers["x-loraplex-tier"] == "device"
    assert headers["x-loraplex-load-ms"] == "0"
    assert "x-loraplex-alias" not in headers
    assert "x-loraplex-canary" not in headers
    assert "x-loraplex-adapter-version" not in ask(owner, "tiny").headers


def test_rollback_restores_the_whole_target_and_goes_further_back(
    fresh_owner: Caller, adapters: list[Path]
) -> None:
    fresh_owner.push(adapters[2], "bot")
    fresh_owner.http.put(PROD, json={"version": 1})
    split(fresh_owner, 10)
    fresh_owner.http.put(PROD, json={"version": 3})

    first = fresh_owner.http.post(f"{PROD}/rollback").json()
    assert (first["version"], first["canary"]) == (1, {"version": 2, "percent": 10, "limits": None})
    second = fresh_owner.http.post(f"{PROD}/rollback").json()
    assert (second["version"], second["canary"]) == (1, None)
    check_envelope(fresh_owner.http.post(f"{PROD}/rollback"), "nothing_to_roll_back")

    changes = fresh_owner.http.get(f"{PROD}/history").json()["data"]
    assert [change["action"] for change in changes] == [
        "rollback",
        "rollback",
        "set",
        "canary",
        "set",
    ]
    assert [change["version"] for change in changes] == [1, 1, 3, 1, 1]
    key_id = fresh_owner.http.get("/v1/me").json()["key"]
    assert {change["changed_by"] for change in changes} == {f"key:{key_id}"}
    assert len(fresh_owner.http.get(f"{PROD}/history", params={"limit": 2}).json()["data"]) == 2


def test_the_history_says_who_it_was_whoever_it_was(
    fresh_owner: Caller, server: ServerUnderTest, adapters: list[Path]
) -> None:
    operator = {
        "authorization": f"Bearer {server.make_operator(f'root-{fresh_owner.slug}')}",
        "x-loraplex-tenant": fresh_owner.slug,
    }
    key_id = fresh_owner.http.get("/v1/me").json()["key"]
    fresh_owner.http.put(PROD, json={"version": 1})
    httpx.put(f"{server.url}{PROD}", headers=operator, json={"version": 2})
    with signed_in_user(server, fresh_owner, "developer") as browser:
        browser.http.post(f"{PROD}/rollback")
        client = ApiClient(browser.http, server.url)
        pushed = push_adapter(
            client,
            read_adapter(adapters[0]),
            "new",
            aliases=["prod"],
            base_id=None,
            progress=Progress(),
        )
        wait_until_settled(client, pushed)
        browser.http.delete(PROD)
    user = f"user:developer@{fresh_owner.slug}.example"
    assert authors(fresh_owner, PROD) == [
        user,
        user,
        f"operator:root-{fresh_owner.slug}",
        f"key:{key_id}",
    ]
    assert authors(fresh_owner, "/v1/adapters/new/aliases/prod") == [user]
    assert httpx.delete(f"{server.url}/v1/adapters/new", headers=operator).is_success
    assert authors(fresh_owner, "/v1/adapters/new/aliases/prod") == [
        f"operator:root-{fresh_owner.slug}",
        user,
    ]


def authors(caller: Caller, alias: str) -> list[str]:
    """Who made each change, the newest first."""
    return [change["changed_by"] for change in caller.http.get(f"{alias}/history").json()["data"]]


def test_an_alias_is_changed_only_as_it_was_read(owner: Caller) -> None:
    made = owner.http.put(PROD, json={"version": 1})
    read = owner.http.get(PROD)
    assert read.json() == made.json()
    stale = {"if-match": read.headers["etag"]}
    assert made.headers["etag"] == read.headers["etag"]

    split = {"version": 1, "canary": canary(2, 10)}
    moved = owner.http.put(PROD, json=split, headers=stale)
    assert moved.headers["etag"] == owner.http.get(PROD).headers["etag"] != read.headers["etag"]
    for late in (
        owner.http.put(PROD, json={"version": 3}, headers=stale),
        owner.http.post(f"{PROD}/rollback", headers=stale),
        owner.http.delete(PROD, headers=stale),
    ):
        check_envelope(late, "etag_mismatch")
    assert owner.http.get(PROD).json() == moved.json()

    current = {"if-match": moved.headers["etag"]}
    back = owner.http.post(f"{PROD}/rollback", headers=current)
    assert back.json()["canary"] is None
    gone = owner.http.delete(PROD, headers={"if-match": back.headers["etag"]})
    assert gone.status_code == 204


def test_what_is_changed_only_if_it_is_there_is_not_made(owner: Caller) -> None:
    late = owner.http.put(PROD, json={"version": 1}, headers={"if-match": "*"})
    check_envelope(late, "etag_mismatch")
    check_envelope(owner.http.get(PROD), "alias_not_found")
    assert owner.http.put(PROD, json={"version": 1}).is_success


def test_of_many_who_change_an_alias_as_they_read_it_one_does(owner: Caller) -> None:
    tag = {"if-match": owner.http.put(PROD, json={"version": 1}).headers["etag"]}
    with ThreadPoolExecutor(6) as threads:
        answers = list(
            threads.map(
                lambda number: owner.http.put(PROD, json={"version": 2 + number % 2}, headers=tag),
                range(6),
            )
        )
    assert sorted(answer.status_code for answer in answers) == [200] + [412] * 5


def test_what_cannot_be_rolled_back_to_says_so(fresh_owner: Caller) -> None:
    check_envelope(fresh_owner.http.post(f"{PROD}/rollback"), "alias_not_found")
    fresh_owner.http.put(PROD, json={"version": 1})
    fresh_owner.http.put(PROD, json={"version": 2})
    assert fresh_owner.http.delete("/v1/adapters/bot/versions/1").status_code == 200
    check_envelope(fresh_owner.http.post(f"{PROD}/rollback"), "nothing_to_roll_back")
    assert fresh_owner.http.get("/v1/adapters/bot").json()["aliases"] == {"prod": 2}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"version": 1, "canary": canary(2, 0)}, "invalid_parameter", "canary.percent"),
        ({"version": 1, "canary": canary(2, 100)}, "invalid_parameter", "canary.percent"),
        ({"version": 1, "canary": {"version": 2}}, "invalid_parameter", "canary.percent"),
        ({"version": 1, "canary": canary(1, 5)}, "invalid_parameter", "canary.version"),
        ({"version": 1, "canary": canary(9, 5)}, "version_not_found", None),
        ({"version": 9}, "version_not_found", None),
        ({"version": 0}, "invalid_parameter", "version"),
        ({"version": 1, "weight": 5}, "unsupported_parameter", "weight"),
    ],
)
def test_a_target_that_is_none_is_refused(
    owner: Caller, body: dict[str, Any], code: str, param: str | None
) -> None:
    check_envelope(owner.http.put(PROD, json=body), code, param)
    assert owner.http.get("/v1/adapters/bot").json()["aliases"] == {}


def test_a_version_that_is_the_canary_is_kept(owner: Caller) -> None:
    split(owner, 5)
    check_envelope(owner.http.delete("/v1/adapters/bot/versions/2"), "version_aliased")
