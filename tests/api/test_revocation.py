"""Two servers on one database: a revocation on one applies to the other within five seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from loraplex.platform.keys.models import ApiKey
from support.browser import Browser, signed_in_operator, signed_in_user
from support.envelopes import check_envelope
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, serving
from support.waiting import wait_for

PROMISED_SECONDS = 5.0


@pytest.fixture(scope="module")
def other(
    server: ServerUnderTest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    """Another server on the same database, with the same secret."""
    environment = {
        "LORAPLEX_DATABASE": server.settings.database_url,
        "LORAPLEX_SECRET": (server.settings.data_dir / "secret").read_text(),
    }
    folder = tmp_path_factory.mktemp("other")
    name = ("--served-model-name", "tiny")
    with serving(tiny_base, folder, *name, engine=FAKE_ENGINE, **environment) as running:
        yield running


@pytest.fixture
def elsewhere(other: ServerUnderTest) -> Iterator[httpx.Client]:
    """A connection to the other server, without a key."""
    with httpx.Client(base_url=other.url, timeout=60.0) as client:
        yield client


def status(client: httpx.Client, key: str) -> int:
    return client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_a_new_key_is_good_everywhere_at_once_and_a_revoked_one_nowhere_after_five_seconds(
    caller: Caller, elsewhere: httpx.Client
) -> None:
    issued = caller.http.post("/v1/keys", json={"name": "x", "scopes": ["infer"]}).json()
    key = issued["key"]
    assert [status(caller.http, key), status(elsewhere, key)] == [200, 200]
    caller.http.delete(f"/v1/keys/{issued['id']}")
    assert status(caller.http, key) == 401
    wait_for(lambda: status(elsewhere, key) == 401, seconds=PROMISED_SECONDS)


@pytest.mark.slow
def test_a_suspended_tenant_and_a_disabled_user_are_refused_everywhere(
    server: ServerUnderTest, caller: Caller, elsewhere: httpx.Client
) -> None:
    user = caller.http.post("/v1/users", json={"email": "a@example.com", "role": "developer"})
    path = f"/v1/users/{user.json()['id']}"
    body = {"name": "x", "scopes": ["infer"], "user": user.json()["id"]}
    key = caller.http.post("/v1/keys", json=body).json()["key"]
    assert status(elsewhere, key) == 200
    caller.http.patch(path, json={"role": "viewer"})
    wait_for(lambda: status(elsewhere, key) == 403, seconds=PROMISED_SECONDS)
    caller.http.patch(path, json={"disabled": True})
    wait_for(lambda: status(elsewhere, key) == 401, seconds=PROMISED_SECONDS)
    assert status(elsewhere, caller.key) == 200
    headers = {"authorization": f"Bearer {server.make_operator(f'suspends-{caller.slug}')}"}
    tenant = f"{server.url}/admin/tenants/{caller.slug}"
    httpx.patch(tenant, json={"suspended": True}, headers=headers)
    check_envelope(caller.http.get("/v1/models"), "tenant_suspended")
    wait_for(lambda: status(elsewhere, caller.key) == 403, seconds=PROMISED_SECONDS)


def test_who_is_signed_in_is_so_everywhere_and_no_longer_than_the_account_is(
    server: ServerUnderTest, caller: Caller, elsewhere: httpx.Client
) -> None:
    def is_in(browser: Browser) -> bool:
        headers = {"cookie": cookies[browser]}
        return elsewhere.get("/v1/session", headers=headers).is_success

    admin_key = server.make_operator(f"admin-{caller.slug}")
    gone = f"gone-{caller.slug}"
    server.make_operator(gone)
    with (
        signed_in_user(server, caller, "developer") as user,
        signed_in_user(server, caller, "viewer") as leaves,
        signed_in_operator(server, gone, admin_key) as operator,
        httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {admin_key}"}) as http,
    ):
        cookies = {each: each.headers["cookie"] for each in (user, leaves, operator)}
        assert [is_in(each) for each in cookies] == [True, True, True]
        (row,) = caller.http.get("/v1/users", params={"role": "developer"}).json()["data"]
        caller.http.patch(f"/v1/users/{row['id']}", json={"disabled": True}).raise_for_status()
        wait_for(lambda: not is_in(user), seconds=PROMISED_SECONDS)
        caller.http.patch(f"/v1/users/{row['id']}", json={"disabled": False}).raise_for_status()
        assert not is_in(user), "who comes back is invited anew"
        leaves.http.delete("/v1/sessions").raise_for_status()
        wait_for(lambda: not is_in(leaves), seconds=PROMISED_SECONDS)
        http.patch(f"/admin/operators/{gone}", json={"disabled": True}).raise_for_status()
        wait_for(lambda: not is_in(operator), seconds=PROMISED_SECONDS)
        http.patch(f"/admin/operators/{gone}", json={"disabled": False}).raise_for_status()
        assert not is_in(operator), "an operator who comes back too"


def test_what_was_changed_beside_the_servers_is_seen_by_all(
    server: ServerUnderTest, make_caller: Callable[[], Caller]
) -> None:
    caller = make_caller()
    assert status(caller.http, caller.key) == 200
    database = server.database
    with database.transaction(caller.tenant_id) as session:
        key = session.scalars(select(ApiKey)).one()
        key.revoked_at = key.created_at
    database.close()
    wait_for(lambda: status(caller.http, caller.key) == 401, seconds=PROMISED_SECONDS)
