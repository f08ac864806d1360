"""`/v1/me`, `/v1/keys`, `/v1/users`, `/admin/tenants`, `/admin/operators` on a running server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partialmethod
from itertools import count
from typing import Any, ClassVar

import httpx
import pytest
from sqlalchemy import select

from loraplex.platform.audit.models import AuditEntry, PlatformAuditEntry
from loraplex.platform.keys.principal import OperatorRole, Scope
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest

_numbers = count(1)
EVERYTHING = sorted(Scope)


@pytest.fixture(autouse=True, scope="module")
def connections(server: ServerUnderTest) -> Iterator[httpx.Client]:
    """One client for all holders of keys, since each would keep a connection."""
    with httpx.Client(base_url=server.url, timeout=60.0) as shared:
        Holder.connections = shared
        yield shared


class Holder:
    """Whoever holds this key, acting on a tenant that is named or not."""

    connections: ClassVar[httpx.Client]

    def __init__(self, key: str, tenant: str | None = None) -> None:
        self._headers = {"authorization": f"Bearer {key}"}
        if tenant is not None:
            self._headers["x-loraplex-tenant"] = tenant

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {**self._headers, **options.pop("headers", {})}
        return self.connections.request(method, path, headers=headers, **options)

    get = partialmethod(request, "GET")
    post = partialmethod(request, "POST")
    patch = partialmethod(request, "PATCH")
    delete = partialmethod(request, "DELETE")


@pytest.fixture(scope="module")
def admin_key(server: ServerUnderTest) -> str:
    return server.make_operator("admin-of-identity")


@pytest.fixture(scope="module")
def viewer_key(server: ServerUnderTest) -> str:
    return server.make_operator("viewer-of-identity", OperatorRole.VIEWER)


@pytest.fixture
def admin(admin_key: str) -> Holder:
    return Holder(admin_key)


@pytest.fixture
def slug() -> str:
    return f"identity-{next(_numbers)}"


def issue(caller: Caller, **body: Any) -> dict[str, Any]:
    answer = caller.http.post("/v1/keys", json={"name": "test", "scopes": EVERYTHING, **body})
    assert answer.status_code == 201, answer.text
    issued: dict[str, Any] = answer.json()
    return issued


def without_ids(answer: httpx.Response) -> bytes:
    return answer.content.replace(answer.headers["x-request-id"].encode(), b"")


# --- who calls ----------------------------------------------------------------------------------


def test_me_tells_a_tenants_key_what_it_is(server: ServerUnderTest, caller: Caller) -> None:
    issued = issue(
        caller, scopes=["infer"], adapters=["b", "a"], networks=["127.0.0.0/8"], expires_in_days=1
    )
    me = Holder(issued["key"]).get("/v1/me").json()
    assert me["tenant"] == {"id": caller.tenant_id, "slug": caller.slug}
    assert me["actor"] == {"kind": "key", "id": issued["id"], "name": "test"}
    assert me["operator_role"] is None
    assert (me["scopes"], me["adapters"], me["networks"]) == (
        ["infer"],
        ["a", "b"],
        ["127.0.0.0/8"],
    )
    assert (me["key"], me["expires_at"]) == (issued["id"], issued["expires_at"])


def test_me_tells_an_operator_what_it_is_in_a_tenant_and_in_none(
    server: ServerUnderTest, caller: Caller, viewer_key: str
) -> None:
    alone = Holder(viewer_key).get("/v1/me").json()
    assert (alone["actor"]["kind"], alone["tenant"], alone["operator_role"]) == (
        "operator",
        None,
        "viewer",
    )
    within = Holder(viewer_key, caller.slug).get("/v1/me").json()
    assert within["tenant"]["slug"] == caller.slug
    assert within["actor"] == alone["actor"]
    reading = {"adapters:read", "usage:read", "audit:read", "webhooks:read"}
    assert set(within["scopes"]) == reading


# --- keys ---------------------------------------------------------------------------------------


def test_a_key_is_shown_once_and_never_again(caller: Caller) -> None:
    issued = issue(caller, name="ci")
    answers = [
        caller.http.get("/v1/keys"),
        caller.http.get(f"/v1/keys/{issued['id']}"),
        caller.http.delete(f"/v1/keys/{issued['id']}"),
    ]
    secret = issued["key"].rpartition("_")[2]
    for answer in answers:
        assert answer.status_code == 200
        assert secret not in answer.text
        assert '"key":' not in answer.text
    assert issued["created_by"].startswith("key:")


def test_a_revoked_key_is_refused_from_the_answer_on(
    server: ServerUnderTest, caller: Caller
) -> None:
    issued = issue(caller)
    holder = Holder(issued["key"])
    assert holder.get("/v1/models").status_code == 200
    revoked = caller.http.delete(f"/v1/keys/{issued['id']}").json()
    check_envelope(holder.get("/v1/models"), "invalid_api_key")
    assert caller.http.delete(f"/v1/keys/{issued['id']}").json() == revoked


def test_a_rotated_key_and_its_successor_both_serve_until_the_overlap_ends(
    server: ServerUnderTest, caller: Caller
) -> None:
    old = issue(caller, scopes=["infer"])
    path = f"/v1/keys/{old['id']}/rotate"
    new = caller.http.post(path, json={"overlap_seconds": 3600}).json()
    for key in (old["key"], new["key"]):
        assert Holder(key).get("/v1/models").status_code == 200
    assert caller.http.get(f"/v1/keys/{old['id']}").json()["successor"] == new["id"]
    check_envelope(caller.http.post(path, json={}), "state_conflict")
    at_once = caller.http.post(f"/v1/keys/{new['id']}/rotate", json={"overlap_seconds": 0}).json()
    check_envelope(Holder(new["key"]).get("/v1/models"), "invalid_api_key")
    assert Holder(at_once["key"]).get("/v1/models").status_code == 200


def test_keys_are_listed_in_pages_the_oldest_first(caller: Caller) -> None:
    ids = [issue(caller, name=str(number))["id"] for number in range(5)]
    caller.http.delete(f"/v1/keys/{ids[1]}")
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = caller.http.get("/v1/keys", params=query).json()
        assert len(page["data"]) <= 2
        seen += [key["id"] for key in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["next_after"]
    assert seen[1:] == ids
    active = caller.http.get("/v1/keys", params={"active": True}).json()["data"]
    assert ids[1] not in [key["id"] for key in active]
    assert len(active) == 5


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"name": "x"}, "invalid_parameter", "scopes"),
        ({"name": "x", "scopes": []}, "invalid_parameter", "scopes"),
        ({"name": "x", "scopes": ["everything"]}, "invalid_parameter", "scopes.0"),
        ({"name": "", "scopes": ["infer"]}, "invalid_parameter", "name"),
        ({"name": "x", "scopes": ["infer"], "networks": ["10.1.2.3/8"]}, "invalid_parameter",
         "networks"),
        ({"name": "x", "scopes": ["infer"], "adapters": []}, "invalid_parameter", "adapters"),
        ({"name": "x", "scopes": ["audit:read"], "adapters": ["a"]}, "invalid_parameter",
         "scopes"),
        ({"name": "x", "scopes": ["infer"], "expires_in_days": 0}, "invalid_parameter",
         "expires_in_days"),
        ({"name": "x", "scopes": ["infer"], "user": "nobody"}, "user_not_found", None),
        ({"name": "x", "scopes": ["infer"], "admin": True}, "unsupported_parameter", "admin"),
    ],
)  # fmt: skip
def test_refuses_a_key_that_cannot_be_made(
    caller: Caller, body: dict[str, Any], code: str, param: str | None
) -> None:
    check_envelope(caller.http.post("/v1/keys", json=body), code, param)


def test_nobody_issues_a_key_wider_than_their_own(server: ServerUnderTest, caller: Caller) -> None:
    narrow = Holder(issue(caller, scopes=["infer", "keys:manage"], adapters=["a"])["key"])
    for body, param in (
        ({"scopes": ["infer", "adapters:read"], "adapters": ["a"]}, "scopes"),
        ({"scopes": ["infer"], "adapters": ["b"]}, "adapters"),
        ({"scopes": ["infer"]}, "adapters"),
    ):
        answer = narrow.post("/v1/keys", json={"name": "wider", **body})
        check_envelope(answer, "grant_too_wide", param)
    made = narrow.post("/v1/keys", json={"name": "x", "scopes": ["infer"], "adapters": ["a"]})
    assert made.status_code == 201
    listed = narrow.get("/v1/keys").json()["data"]
    assert {key["name"] for key in listed} == {"test", "x"}
    assert all(key["adapters"] == ["a"] for key in listed)


def test_what_was_changed_since_it_was_read_is_not_changed_again(caller: Caller) -> None:
    key_id = issue(caller)["id"]
    tag = caller.http.get(f"/v1/keys/{key_id}").headers["etag"]
    assert caller.http.post(f"/v1/keys/{key_id}/rotate", json={}).status_code == 201
    refused = caller.http.delete(f"/v1/keys/{key_id}", headers={"if-match": tag})
    check_envelope(refused, "etag_mismatch")
    tag = caller.http.get(f"/v1/keys/{key_id}").headers["etag"]
    assert caller.http.delete(f"/v1/keys/{key_id}", headers={"if-match": tag}).is_success


# --- restrictions -------------------------------------------------------------------------------


def test_a_key_is_refused_from_other_networks(server: ServerUnderTest, caller: Caller) -> None:
    here = issue(caller, networks=["127.0.0.0/8", "::1"])["key"]
    elsewhere = issue(caller, networks=["192.0.2.0/24"])["key"]
    assert Holder(here).get("/v1/models").status_code == 200
    check_envelope(Holder(elsewhere).get("/v1/models"), "address_not_allowed")
    forged = {"x-forwarded-for": "192.0.2.1"}  # no proxy is trusted, not even on this machine
    answer = Holder(elsewhere).get("/v1/models", headers=forged)
    check_envelope(answer, "address_not_allowed")


def test_an_operators_key_is_refused_from_other_networks_too(server: ServerUnderTest) -> None:
    root = Holder(server.make_operator("has-networks"))
    path = "/admin/operators/has-networks/keys"

    def issue_to(holder: Holder, *networks: str) -> httpx.Response:
        body = {"name": "x", "networks": list(networks) or None}
        issued: httpx.Response = holder.post(path, json=body)
        return issued

    here, elsewhere = issue_to(root, "127.0.0.0/8", "::1/128"), issue_to(root, "192.0.2.0/24")
    assert here.json()["networks"] == ["127.0.0.0/8", "::1/128"]
    restricted = Holder(here.json()["key"])
    assert restricted.get("/v1/me").json()["networks"] == ["127.0.0.0/8", "::1/128"]
    assert restricted.get("/admin/tenants").is_success
    check_envelope(Holder(elsewhere.json()["key"]).get("/v1/me"), "address_not_allowed")
    check_envelope(issue_to(restricted), "grant_too_wide", "networks")
    assert issue_to(restricted, "127.0.0.1").status_code == 201


def test_a_key_that_ends_issues_none_that_does_not(caller: Caller) -> None:
    scopes = ["infer", "keys:manage"]
    ending = Holder(issue(caller, scopes=scopes, expires_in_days=30)["key"])
    for days in (None, 31):
        body = {"name": "longer", "scopes": ["infer"], "expires_in_days": days}
        check_envelope(ending.post("/v1/keys", json=body), "grant_too_wide", "expires_in_days")
    shorter = {"name": "shorter", "scopes": ["infer"], "expires_in_days": 29}
    assert ending.post("/v1/keys", json=shorter).status_code == 201


def test_a_restricted_key_meets_the_same_as_if_nothing_else_was_there(
    server: ServerUnderTest, resident: Caller
) -> None:
    """`bot` is there, `none` is not; for a key that is for `mine` they are alike, on every path."""
    scopes = ["infer", "adapters:read", "adapters:write"]
    restricted = Holder(issue(resident, scopes=scopes, adapters=["mine"])["key"])
    body = {"prompt": "x", "max_tokens": 1}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/v1/models/{name}", None),
        ("GET", "/v1/models/{name}@1", None),
        ("GET", "/v1/models/resident%2F{name}", None),
        ("POST", "/v1/completions", {"model": "{name}", **body}),
        ("POST", "/v1/completions", {"model": "resident/{name}@prod", **body}),
        ("POST", "/v1/chat/completions", {"model": "{name}", **chat}),
        ("GET", "/v1/adapters/{name}", None),
        ("DELETE", "/v1/adapters/{name}", None),
        ("GET", "/v1/adapters/{name}/versions", None),
        ("GET", "/v1/adapters/{name}/versions/1", None),
        ("DELETE", "/v1/adapters/{name}/versions/1", None),
        ("GET", "/v1/adapters/{name}/versions/1/history", None),
        ("GET", "/v1/adapters/{name}/versions/1/readiness", None),
        ("GET", "/v1/adapters/{name}/versions/1/files/adapter_config.json", None),
        ("PUT", "/v1/adapters/{name}/versions/1/pin", {}),
        ("DELETE", "/v1/adapters/{name}/versions/1/pin", None),
        ("POST", "/v1/adapters/{name}/versions/1/prefetch", {}),
        ("GET", "/v1/adapters/{name}/deletions", None),
        ("GET", "/v1/adapters/{name}/aliases", None),
        ("PUT", "/v1/adapters/{name}/aliases/prod", {"version": 1}),
        ("DELETE", "/v1/adapters/{name}/aliases/prod", None),
        ("POST", "/v1/adapters/{name}/aliases/prod/rollback", None),
        ("GET", "/v1/adapters/{name}/aliases/prod/history", None),
        (
            "POST",
            "/v1/adapters/{name}/uploads",
            {"config": {}, "size_bytes": 1, "sha256": "0" * 64},
        ),
    ]
    for method, path, sent in requests:
        contents = set()
        for name in ("bot", "none"):
            filled = {
                key: value.replace("{name}", name) if key == "model" else value
                for key, value in (sent or {}).items()
            }
            answer = restricted.request(
                method, path.replace("{name}", name), json=None if sent is None else filled
            )
            assert answer.status_code == 404, (path, answer.text)
            contents.add(without_ids(answer).replace(name.encode(), b""))
        assert len(contents) == 1, path
    assert restricted.get("/v1/models").json()["data"] == []
    assert restricted.get("/v1/adapters").json()["data"] == []
    base = {"model": "tiny", **body}
    check_envelope(restricted.post("/v1/completions", json=base), "model_not_found")
    assert resident.http.get("/v1/adapters/bot").status_code == 200


def test_a_restricted_key_uses_what_it_is_for(server: ServerUnderTest, resident: Caller) -> None:
    key = issue(resident, scopes=["infer", "adapters:read"], adapters=["bot"])["key"]
    holder = Holder(key)
    assert [card["id"] for card in holder.get("/v1/models").json()["data"]] == ["bot"]
    answer = holder.post("/v1/completions", json={"model": "bot", "prompt": "x", "max_tokens": 1})
    assert answer.json()["model"] == "resident/bot@1"


def test_a_restricted_key_does_not_meet_uploads_of_others(
    server: ServerUnderTest, caller: Caller
) -> None:
    declared = {"config": {}, "size_bytes": 1, "sha256": "0" * 64}
    upload = caller.http.post("/v1/adapters/theirs/uploads", json=declared).json()["id"]
    scopes = ["adapters:read", "adapters:write"]
    holder = Holder(issue(caller, scopes=scopes, adapters=["mine"])["key"])
    raw = {"content-type": "application/octet-stream"}
    for upload_id in (upload, "no-such-upload"):
        for method, suffix in (("GET", ""), ("PUT", "/content?offset=0"), ("POST", "/commit")):
            path = f"/v1/uploads/{upload_id}{suffix}"
            check_envelope(holder.request(method, path, headers=raw), "upload_not_found")
    assert caller.http.get(f"/v1/uploads/{upload}").json()["received_bytes"] == 0
    own = holder.post("/v1/adapters/mine/uploads", json=declared)
    assert holder.get(f"/v1/uploads/{own.json()['id']}").status_code == 200


# --- users --------------------------------------------------------------------------------------


def test_a_user_comes_and_goes_and_so_does_its_key(server: ServerUnderTest, caller: Caller) -> None:
    made = caller.http.post("/v1/users", json={"email": "Ada@Example.com", "role": "owner"})
    user = made.json()
    assert (made.status_code, user["email"]) == (201, "ada@example.com")
    second = caller.http.post("/v1/users", json={"email": "bob@example.com", "role": "owner"})
    key = issue(caller, user=user["id"])["key"]
    ada = Holder(key)
    assert ada.get("/v1/me").json()["actor"]["kind"] == "user"
    path = f"/v1/users/{user['id']}"
    check_envelope(ada.patch(path, json={"role": "viewer"}), "own_account")
    check_envelope(ada.patch(path, json={"disabled": True}), "own_account")
    # The key follows the role, and the user.
    assert caller.http.patch(path, json={"role": "viewer"}).json()["role"] == "viewer"
    check_envelope(ada.get("/v1/users"), "insufficient_scope")
    last = f"/v1/users/{second.json()['id']}"
    check_envelope(caller.http.patch(last, json={"disabled": True}), "last_administrator")
    assert caller.http.patch(path, json={"disabled": True}).json()["disabled_at"]
    check_envelope(ada.get("/v1/me"), "invalid_api_key")
    assert caller.http.patch(path, json={"disabled": False}).json()["disabled_at"] is None
    check_envelope(ada.get("/v1/me"), "invalid_api_key")


# --- tenants and operators ----------------------------------------------------------------------


def test_an_operator_makes_a_tenant_and_its_first_key(
    server: ServerUnderTest, admin: Holder, admin_key: str, slug: str
) -> None:
    made = admin.post("/admin/tenants", json={"slug": slug, "name": "Acme", "weight": 2.5})
    assert (made.status_code, made.json()["weight"]) == (201, 2.5)
    check_envelope(admin.post("/admin/tenants", json={"slug": slug}), "tenant_exists")
    within = Holder(admin_key, slug)
    issued = within.post("/v1/keys", json={"name": "first", "scopes": ["infer"]}).json()
    assert issued["created_by"].startswith("operator:")
    assert Holder(issued["key"]).get("/v1/me").json()["tenant"]["slug"] == slug
    check_envelope(admin.get("/v1/keys"), "tenant_required")


def test_a_suspended_tenant_is_refused_from_the_answer_on_until_it_is_resumed(
    server: ServerUnderTest, admin: Holder, caller: Caller
) -> None:
    path = f"/admin/tenants/{caller.slug}"
    assert caller.http.get("/v1/models").status_code == 200
    assert admin.patch(path, json={"suspended": True}).json()["suspended_at"]
    check_envelope(caller.http.get("/v1/models"), "tenant_suspended")
    listed = admin.get("/admin/tenants", params={"suspended": True, "limit": 500}).json()["data"]
    assert caller.slug in [tenant["slug"] for tenant in listed]
    assert admin.patch(path, json={"suspended": False}).json()["suspended_at"] is None
    assert caller.http.get("/v1/models").status_code == 200


def test_a_tenant_is_changed_by_what_was_sent_alone(admin: Holder, slug: str) -> None:
    admin.post("/admin/tenants", json={"slug": slug, "name": "Acme", "weight": 2})
    path = f"/admin/tenants/{slug}"
    read = admin.get(path)
    first = admin.patch(path, json={"weight": 3}, headers={"if-match": read.headers["etag"]})
    assert (first.json()["name"], first.json()["weight"]) == ("Acme", 3.0)
    again = admin.patch(path, json={"weight": 4}, headers={"if-match": read.headers["etag"]})
    check_envelope(again, "etag_mismatch")
    assert admin.patch(path, json={"name": None}).json()["name"] is None
    for body, param in (({"weight": 0}, "weight"), ({"slug": "other"}, "slug")):
        answer = admin.patch(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    check_envelope(admin.get("/admin/tenants/no-such-tenant"), "tenant_not_found")


def test_a_tenants_objective_is_set_as_a_whole_and_audited(admin: Holder, slug: str) -> None:
    both = {"ttft_ms": 2000.0, "itl_ms": 80.0}
    made = admin.post("/admin/tenants", json={"slug": slug, "slo": both})
    assert made.json()["slo"] == both
    path = f"/admin/tenants/{slug}"
    assert admin.patch(path, json={"weight": 2}).json()["slo"] == both
    assert admin.patch(path, json={"slo": {"itl_ms": 50}}).json()["slo"] == {
        "ttft_ms": None,
        "itl_ms": 50.0,
    }
    assert admin.patch(path, json={"slo": None}).json()["slo"] == dict.fromkeys(both)
    for body, param in (({"ttft_ms": 0.5}, "slo.ttft_ms"), ({"itl_ms": 1e9}, "slo.itl_ms")):
        answer = admin.patch(path, json={"slo": body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_tenants_are_listed_in_pages(admin: Holder, slug: str) -> None:
    slugs = [f"{slug}-page-{letter}" for letter in "abc"]
    for each in reversed(slugs):
        admin.post("/admin/tenants", json={"slug": each})
    page = admin.get("/admin/tenants", params={"after": f"{slug}-page-", "limit": 2}).json()
    assert [tenant["slug"] for tenant in page["data"]] == slugs[:2]
    assert (page["has_more"], page["next_after"]) == (True, slugs[1])


def test_operators_make_each_other_and_give_keys(
    server: ServerUnderTest, admin: Holder, slug: str
) -> None:
    path = f"/admin/operators/{slug}"
    made = admin.post("/admin/operators", json={"name": slug})
    assert (made.status_code, made.json()["role"]) == (201, "viewer")
    check_envelope(admin.post("/admin/operators", json={"name": slug}), "operator_exists")
    issued = admin.post(f"{path}/keys", json={}).json()
    assert issued["expires_at"] is not None
    viewer = Holder(issued["key"])
    assert viewer.get("/admin/tenants").status_code == 200
    check_envelope(viewer.post("/admin/tenants", json={"slug": f"{slug}-x"}), "insufficient_scope")
    assert admin.patch(path, json={"role": "admin"}).json()["role"] == "admin"
    assert viewer.post("/admin/tenants", json={"slug": f"{slug}-x"}).status_code == 201
    check_envelope(viewer.patch(path, json={"disabled": True}), "own_account")
    listed = admin.get(f"{path}/keys").json()["data"]
    assert [key["id"] for key in listed] == [issued["id"]]
    assert issued["key"] not in str(listed)
    assert admin.delete(f"{path}/keys/{issued['id']}").json()["revoked_at"]
    check_envelope(viewer.get("/admin/tenants"), "invalid_api_key")
    assert admin.patch(path, json={"disabled": True}).json()["disabled_at"]
    check_envelope(admin.post(f"{path}/keys", json={}), "state_conflict")


# --- what is written down -----------------------------------------------------------------------


def test_every_change_is_in_the_audit_log_without_a_secret(
    server: ServerUnderTest, admin: Holder, admin_key: str, slug: str
) -> None:
    admin.post("/admin/tenants", json={"slug": slug})
    within = Holder(admin_key, slug)
    user = within.post("/v1/users", json={"email": "a@example.com"}).json()["id"]
    issued = within.post("/v1/keys", json={"name": "x", "scopes": ["infer"]}).json()
    rotated = within.post(f"/v1/keys/{issued['id']}/rotate", json={}).json()
    revoked = within.delete(f"/v1/keys/{rotated['id']}")
    within.delete(f"/v1/keys/{rotated['id']}")  # nothing is changed any more
    within.patch(f"/v1/users/{user}", json={"role": "developer"})
    within.patch(f"/v1/users/{user}", json={"role": "developer"})  # nor here
    admin.patch(f"/admin/tenants/{slug}", json={"suspended": True})
    database = server.database
    with database.platform_transaction(read_only=True) as session:
        query = select(AuditEntry).where(
            AuditEntry.resource.in_([user, issued["id"], rotated["id"]])
        )
        own = session.scalars(query.order_by(AuditEntry.number)).all()
        query_all = select(PlatformAuditEntry).where(PlatformAuditEntry.resource == slug)
        platforms = session.scalars(query_all.order_by(PlatformAuditEntry.number)).all()
    database.close()
    assert [(entry.action, entry.resource) for entry in own] == [
        ("user.create", user),
        ("key.create", issued["id"]),
        ("key.rotate", issued["id"]),
        ("key.revoke", rotated["id"]),
        ("user.change", user),
    ]
    assert [entry.action for entry in platforms] == ["tenant.create", "tenant.change"]
    revocation = own[3]
    assert revocation.request_id == revoked.headers["x-request-id"]
    assert (revocation.actor_name, revocation.address) == ("admin-of-identity", "127.0.0.1")
    written = str([entry.details for entry in own] + [entry.details for entry in platforms])
    for key in (issued["key"], rotated["key"], admin_key):
        assert key.rpartition("_")[2] not in written


def test_no_key_stands_in_the_servers_log(server: ServerUnderTest, caller: Caller) -> None:
    issued = issue(caller)
    Holder(issued["key"]).get("/v1/me")
    log = server.log.read_text()
    for key in (issued["key"], caller.key):
        assert key.rpartition("_")[2] not in log


def test_the_metrics_say_how_many_keys_end_soon(server: ServerUnderTest) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    for kind in ("tenant", "operator"):
        assert f'loraplex_keys_expiring{{kind="{kind}"}} ' in text
