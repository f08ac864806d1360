"""Sign-in over the API: cookies, forged requests, lockout, and confirmation by password."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from loraplex.platform.accounts.models import AccountSession
from loraplex.platform.base import utc_now
from support.access import MISSING, ROUTES, Kind, concrete
from support.browser import COOKIE, PASSWORD, Browser, signed_in_operator, signed_in_user
from support.envelopes import check_envelope
from support.published import DOCUMENT
from support.secrets_scan import database_bytes, leaks
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, serving
from support.waiting import wait_for

UNSAFE = [route for route in ROUTES if not route.startswith("GET ")]
CLOSED = [route for route in UNSAFE if ROUTES[route].kind is not Kind.OPEN]


@pytest.fixture(scope="module")
def admin_key(server: ServerUnderTest) -> str:
    return server.make_operator("sign-in-admin")


@pytest.fixture(scope="module")
def admin(server: ServerUnderTest, admin_key: str) -> Iterator[Browser]:
    """An operator who is signed in."""
    with signed_in_operator(server, "sign-in-admin", admin_key) as browser:
        yield browser


@pytest.fixture(scope="module")
def tenant(server: ServerUnderTest) -> Caller:
    return server.make_caller("sign-in")


@pytest.fixture(scope="module")
def owner(server: ServerUnderTest, tenant: Caller) -> Iterator[Browser]:
    """A tenant's owner who is signed in."""
    with signed_in_user(server, tenant, "owner") as browser:
        yield browser


@pytest.fixture
def visit(server: ServerUnderTest) -> Iterator[Callable[[], Browser]]:
    """Opens browsers in which nobody is signed in."""
    with ExitStack() as stack:

        def open_one() -> Browser:
            browser = Browser(server.url)
            stack.enter_context(browser.http)
            return browser

        yield open_one


@pytest.fixture
def unlocked(server: ServerUnderTest) -> Iterator[None]:
    """Failures of this test lock nobody else."""
    yield
    server.forget_sign_in_failures()


def test_a_session_says_who_is_signed_in(admin: Browser, owner: Browser) -> None:
    operators = admin.http.get("/v1/session").json()
    assert (operators["kind"], operators["name"]) == ("operator", "sign-in-admin")
    assert (operators["tenant"], operators["role"]) == (None, "admin")
    users = owner.http.get("/v1/session").json()
    assert (users["kind"], users["name"]) == ("user", "owner@sign-in.example")
    assert (users["tenant"], users["role"]) == ("sign-in", "owner")
    assert users["idle_seconds"] == 1800
    assert users["confirmed_until"] is None
    assert users["server"]["base_model"] == "tiny"
    assert users["server"]["tuning"] is True


def test_a_session_acts_as_its_account_does_with_a_key(admin: Browser, owner: Browser) -> None:
    assert owner.http.get("/v1/me").json()["actor"]["kind"] == "user"
    assert owner.http.get("/v1/users").json()["data"][0]["email"] == "owner@sign-in.example"
    check_envelope(owner.http.get("/admin/tenants"), "insufficient_scope")
    assert admin.http.get("/admin/tenants").is_success
    check_envelope(admin.http.get("/v1/users"), "tenant_required")
    within = {"x-loraplex-tenant": "sign-in"}
    assert admin.http.get("/v1/users", headers=within).is_success
    foreign = owner.http.get("/v1/users", headers={"x-loraplex-tenant": "no-such"})
    check_envelope(foreign, "tenant_not_found")


def test_what_the_cookie_holds_is_no_key(owner: Browser, server: ServerUnderTest) -> None:
    assert owner.http.get("/v1/me").is_success, "the server knows the session for some seconds"
    sent = {"authorization": f"Bearer {owner.http.cookies[COOKIE]}"}
    check_envelope(httpx.get(f"{server.url}/v1/me", headers=sent), "invalid_api_key")


def test_a_session_sends_a_request_again_and_it_is_done_once(
    owner: Browser, server: ServerUnderTest, tenant: Caller, visit: Callable[[], Browser]
) -> None:
    body, key = {"email": "again@sign-in.example", "role": "viewer"}, {"idempotency-key": "again"}
    first = owner.http.post("/v1/users", json=body, headers=key)
    assert first.status_code == 201, first.text
    again = owner.http.post("/v1/users", json=body, headers=key)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    forged = {**key, "x-csrf-token": "0" * 64}
    check_envelope(owner.http.post("/v1/users", json=body, headers=forged), "csrf_failed")
    other = visit()
    other.sign_in("owner@sign-in.example", "sign-in").raise_for_status()
    check_envelope(other.http.post("/v1/users", json=body, headers=key), "user_exists")


def test_the_cookie_is_kept_from_scripts_other_sites_and_other_transports(
    admin: Browser, server: ServerUnderTest, visit: Callable[[], Browser]
) -> None:
    cookie = _set_cookie(visit().sign_in("sign-in-admin"))
    assert cookie[0].startswith(f"{COOKIE}=lpx_session_")
    assert {"httponly", "samesite=strict", "path=/"} == set(cookie[1:])


def _set_cookie(answer: httpx.Response) -> list[str]:
    """The cookie and its attributes."""
    name, *attributes = answer.headers["set-cookie"].split("; ")
    return [name, *(each.lower() for each in attributes)]


def test_signing_in_makes_a_new_session_whatever_the_browser_had(
    admin: Browser, server: ServerUnderTest, visit: Callable[[], Browser]
) -> None:
    planted = "lpx_session_" + "A" * 43
    browser = visit()
    browser.http.cookies.set(COOKIE, planted)
    token = _set_cookie(browser.sign_in("sign-in-admin"))[0].partition("=")[2]
    assert token != planted
    again = _set_cookie(visit().sign_in("sign-in-admin"))[0].partition("=")[2]
    assert again != token
    sent = {"cookie": f"{COOKIE}={planted}"}
    check_envelope(httpx.get(f"{server.url}/v1/session", headers=sent), "session_ended")


@pytest.mark.parametrize("route", CLOSED)
def test_no_page_of_others_changes_anything(route: str, admin: Browser, owner: Browser) -> None:
    method, path = route.split(" ", 1)
    of_operators = {Kind.OPERATOR, Kind.ADMINISTRATOR}
    browser = admin if ROUTES[route].kind in of_operators else owner
    own = browser.headers
    token = {"x-csrf-token": own["x-csrf-token"]}
    origin = {"origin": own["origin"]}
    forged = [
        origin,
        {**origin, "x-csrf-token": "0" * 64},
        {**origin, "x-csrf-token": (owner if browser is admin else admin).headers["x-csrf-token"]},
        token,
        {**token, "origin": "https://evil.example"},
        {**token, "origin": "null"},
        {**token, **origin, "sec-fetch-site": "cross-site"},
        {**token, **origin, "sec-fetch-site": "same-site"},
        {**token, **origin, "sec-fetch-site": "none"},
    ]
    with httpx.Client(base_url=str(browser.http.base_url)) as http:
        for headers in forged:
            answer = http.request(
                method,
                concrete(path, MISSING),
                headers={"cookie": own["cookie"], "content-type": "application/json", **headers},
                content=b"{}" if method in {"POST", "PUT", "PATCH"} else None,
            )
            check_envelope(answer, "csrf_failed")


def test_a_page_of_ours_may_say_so_by_either_header(owner: Browser) -> None:
    own = owner.headers
    sent = {name: own[name] for name in ("cookie", "x-csrf-token")}
    for says_so in ({"origin": own["origin"]}, {"sec-fetch-site": "same-origin"}):
        with httpx.Client(base_url=owner.http.base_url, headers={**sent, **says_so}) as http:
            answer = http.delete("/v1/users/nobody")
            check_envelope(answer, "method_not_allowed")
            answer = http.post("/v1/adapters/bot/uploads", json={})
            check_envelope(answer, "invalid_parameter", "config")


@pytest.mark.parametrize("route", ["POST /v1/session", "POST /v1/session/enrolment"])
def test_nobody_is_signed_in_from_a_page_of_others(route: str, server: ServerUnderTest) -> None:
    path = route.split(" ")[1]
    headers = {"origin": "https://evil.example"}
    check_envelope(httpx.post(f"{server.url}{path}", headers=headers, json={}), "csrf_failed")


def test_no_answer_lets_other_origins_read_it(admin: Browser) -> None:
    headers = {"origin": "https://evil.example"}
    for answer in (
        admin.http.get("/v1/session", headers=headers),
        admin.http.options(
            "/v1/session", headers={**headers, "access-control-request-method": "POST"}
        ),
    ):
        assert not any(name.startswith("access-control") for name in answer.headers)


# --- where one may sign in ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """A server behind a proxy on this machine."""
    folder = tmp_path_factory.mktemp("proxied")
    trusted = {"LORAPLEX_TRUSTED_PROXIES": "127.0.0.1/32"}
    with serving(tiny_base, folder, engine=FAKE_ENGINE, **trusted) as running:
        yield running


def test_behind_a_proxy_the_cookie_is_bound_to_tls_and_the_host(proxied: ServerUnderTest) -> None:
    key = proxied.make_operator("root")
    sent = {
        "host": "console.example",
        "origin": "https://console.example",
        "x-forwarded-for": "192.0.2.7",
        "x-forwarded-proto": "https",
    }
    with httpx.Client(base_url=proxied.url, headers=sent) as http:
        bearer = {"authorization": f"Bearer {key}"}
        invitation = http.post("/admin/operators/root/invitation", headers=bearer).json()
        assert invitation["url"] == f"https://console.example/console/join#{invitation['token']}"
        body = {"token": invitation["token"], "password": PASSWORD}
        answer = http.post("/v1/session/enrolment", json=body)
        name, *attributes = _set_cookie(answer)
        assert name.startswith("__Host-loraplex=")
        assert set(attributes) == {"httponly", "samesite=strict", "path=/", "secure"}
        assert answer.headers["strict-transport-security"]
        assert http.get("/v1/session", headers={"cookie": name}).json()["name"] == "root"
        plain = name.replace("__Host-loraplex", COOKIE)
        check_envelope(http.get("/v1/session", headers={"cookie": plain}), "missing_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "192.0.2.7", "x-forwarded-proto": "http"},
        {"x-forwarded-for": "192.0.2.7"},
        {"host": "console.example"},
    ],
)
def test_nobody_signs_in_over_plain_http_from_elsewhere(
    headers: dict[str, str], proxied: ServerUnderTest
) -> None:
    body = {"name": "root", "password": PASSWORD}
    answer = httpx.post(f"{proxied.url}/v1/session", headers=headers, json=body)
    check_envelope(answer, "insecure_transport")


def test_a_callers_own_word_about_its_transport_does_not_count(server: ServerUnderTest) -> None:
    sent = {"host": "console.example", "x-forwarded-proto": "https"}
    body = {"name": "root", "password": PASSWORD}
    answer = httpx.post(f"{server.url}/v1/session", headers=sent, json=body)
    check_envelope(answer, "insecure_transport")


def test_a_server_without_a_provider_says_so(server: ServerUnderTest, tenant: Caller) -> None:
    url = f"{server.url}/v1/session/oidc"
    assert httpx.get(url).json()["name"] is None
    check_envelope(httpx.post(url, json={}), "identity_provider_missing")
    body = {"code": "x", "state": "x"}
    check_envelope(httpx.post(f"{url}/callback", json=body), "identity_provider_missing")
    user = tenant.http.post("/v1/users", json={"email": "a@acme.example", "role": "viewer"}).json()
    answer = tenant.http.put(f"/v1/users/{user['id']}/identity", json={"subject": "x"})
    check_envelope(answer, "identity_provider_missing")


# --- failures -------------------------------------------------------------------------------------


def test_unknown_names_fail_as_wrong_passwords_do(
    admin: Browser,
    owner: Browser,
    server: ServerUnderTest,
    unlocked: None,
    visit: Callable[[], Browser],
) -> None:
    told = set()
    for name, tenant, password in (
        ("sign-in-admin", None, "x" * 12),
        ("nobody", None, PASSWORD),
        ("owner@sign-in.example", "no-such-tenant", PASSWORD),
        ("owner@sign-in.example", None, PASSWORD),
    ):
        answer = visit().sign_in(name, tenant, password)
        error = check_envelope(answer, "sign_in_failed")
        told.add((error["message"], answer.headers.get("set-cookie")))
    assert len(told) == 1


def test_five_failures_lock_the_name_and_the_address(
    admin: Browser,
    owner: Browser,
    server: ServerUnderTest,
    unlocked: None,
    visit: Callable[[], Browser],
) -> None:
    for _ in range(5):
        check_envelope(visit().sign_in("nobody", None, "x" * 12), "sign_in_failed")
    for name, tenant in (("nobody", None), ("owner@sign-in.example", "sign-in")):
        answer = visit().sign_in(name, tenant)
        check_envelope(answer, "sign_in_locked")
        assert 800 < int(answer.headers["retry-after"]) <= 900
    assert owner.http.get("/v1/session").is_success, "who is signed in stays so"


def test_whoever_signs_in_to_an_own_account_guesses_no_more_of_the_others(
    owner: Browser, server: ServerUnderTest, unlocked: None, visit: Callable[[], Browser]
) -> None:
    for number in range(5):
        if number == 4:
            visit().sign_in("owner@sign-in.example", "sign-in").raise_for_status()
        check_envelope(visit().sign_in(f"guess-{number}", None, "x" * 12), "sign_in_failed")
    check_envelope(visit().sign_in("owner@sign-in.example", "sign-in"), "sign_in_locked")


def test_many_guesses_at_once_are_no_more_than_one_after_another(
    admin: Browser, server: ServerUnderTest, unlocked: None, visit: Callable[[], Browser]
) -> None:
    def guess(number: int) -> str:
        answer = visit().sign_in("sign-in-admin", None, f"guess number {number:02}")
        code: str = answer.json()["error"]["code"]
        return code

    with ThreadPoolExecutor(12) as threads:
        codes = list(threads.map(guess, range(12)))
    assert set(codes) == {"sign_in_failed", "sign_in_locked"}
    assert 5 <= codes.count("sign_in_failed") <= 6, "one more may be under way at the fifth"


# --- invitations and passwords ------------------------------------------------------------------


def test_of_many_who_use_one_invitation_at_once_one_is_let_in(
    admin: Browser, admin_key: str, server: ServerUnderTest, visit: Callable[[], Browser]
) -> None:
    server.make_operator("invited-once")
    path = "/admin/operators/invited-once/invitation"
    headers = {"authorization": f"Bearer {admin_key}"}
    token = httpx.post(f"{server.url}{path}", headers=headers).json()["token"]
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: visit().enrol(token), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, 403, 403, 403, 403, 403]
    for answer in answers:
        if not answer.is_success:
            check_envelope(answer, "invitation_ended")


def test_an_invitation_names_the_server_as_the_caller_calls_it(
    admin_key: str, server: ServerUnderTest
) -> None:
    server.make_operator("invited-oddly")
    headers = {"authorization": f"Bearer {admin_key}", "host": "[::1]:9"}
    answer = httpx.post(f"{server.url}/admin/operators/invited-oddly/invitation", headers=headers)
    assert answer.status_code == 201, answer.text
    assert answer.json()["url"].startswith("http://[::1]:9/console/")


@pytest.mark.parametrize("password", ["", "x" * 11, "x" * 1025])
def test_a_password_has_twelve_characters_at_least(
    password: str, server: ServerUnderTest, visit: Callable[[], Browser]
) -> None:
    answer = visit().enrol("lpx_join_" + "x" * 43, password)
    error = check_envelope(answer, "invalid_parameter", "password")
    assert not password or password not in error["message"]


def test_another_password_ends_the_other_sessions(
    admin_key: str, server: ServerUnderTest, visit: Callable[[], Browser]
) -> None:
    server.make_operator("changes-password")
    with signed_in_operator(server, "changes-password", admin_key) as browser:
        other = visit()
        other.sign_in("changes-password").raise_for_status()
        body = {"current": PASSWORD, "new": f"{PASSWORD}, another"}
        assert browser.http.post("/v1/session/password", json=body).status_code == 204
        assert browser.http.get("/v1/session").is_success
        check_envelope(other.http.get("/v1/session"), "session_ended")
        check_envelope(other.sign_in("changes-password"), "sign_in_failed")
        assert other.sign_in("changes-password", None, body["new"]).is_success


def test_signing_out_ends_the_session_and_takes_the_cookie(
    admin_key: str, tenant: Caller, server: ServerUnderTest, visit: Callable[[], Browser]
) -> None:
    server.make_operator("signs-out")
    with signed_in_operator(server, "signs-out", admin_key) as here:
        elsewhere = visit()
        elsewhere.sign_in("signs-out").raise_for_status()
        kept = {"cookie": here.headers["cookie"]}
        answer = here.http.delete("/v1/session")
        assert answer.status_code == 204
        assert f'{COOKIE}=""' in answer.headers["set-cookie"]
        check_envelope(httpx.get(f"{server.url}/v1/session", headers=kept), "session_ended")
        assert elsewhere.http.get("/v1/session").is_success
        here.sign_in("signs-out").raise_for_status()
        within = {"x-loraplex-tenant": tenant.slug}  # as the console sends it
        assert here.http.delete("/v1/sessions", headers=within).status_code == 204
        check_envelope(elsewhere.http.get("/v1/session"), "session_ended")


CONFIRMED = [
    ("POST", "/v1/keys", {"name": "x", "scopes": ["infer"]}),
    ("POST", "/v1/keys/000000000000/rotate", {}),
    ("POST", f"/v1/users/{'0' * 36}/invitation", None),
    ("PATCH", f"/v1/users/{'0' * 36}", {"role": "owner"}),
    ("DELETE", "/v1/adapters/bot", None),
    ("DELETE", "/v1/adapters/bot/versions/1", None),
]
OPERATORS_CONFIRMED = [
    ("PATCH", "/admin/tenants/sign-in", {"suspended": False}),
    ("POST", "/admin/operators/sign-in-admin/invitation", None),
    ("POST", "/admin/operators/sign-in-admin/keys", {}),
    ("PATCH", "/admin/operators/sign-in-admin", {"role": "admin"}),
]


def test_what_could_not_be_undone_needs_the_password_anew(
    admin_key: str, tenant: Caller, server: ServerUnderTest
) -> None:
    server.make_operator("confirms")
    with (
        signed_in_user(server, tenant, "owner", name="confirms") as owner,
        signed_in_operator(server, "confirms", admin_key) as admin,
    ):
        for browser, requests in ((owner, CONFIRMED), (admin, OPERATORS_CONFIRMED)):
            for method, path, body in requests:
                answer = browser.http.request(method, path, json=body)
                check_envelope(answer, "confirmation_required")
            wrong = browser.http.post("/v1/session/confirmation", json={"password": "x"})
            check_envelope(wrong, "sign_in_failed")
            browser.confirm()
            for method, path, body in requests:
                answer = browser.http.request(method, path, json=body)
                assert answer.is_success or answer.status_code == 404, answer.text


def test_a_session_that_is_not_used_ends(
    owner: Browser, server: ServerUnderTest, tenant: Caller, visit: Callable[[], Browser]
) -> None:
    browser = visit()
    browser.sign_in("owner@sign-in.example", "sign-in").raise_for_status()
    database = server.database
    with database.transaction(tenant.tenant_id) as session:
        for row in session.scalars(select(AccountSession)):
            if row.created_at > utc_now() - timedelta(seconds=1):
                row.seen_at -= timedelta(minutes=30)
    database.close()
    wait_for(lambda: browser.http.get("/v1/session").status_code == 401, seconds=5)


def test_who_signed_in_and_out_stands_in_the_audit_log(owner: Browser, tenant: Caller) -> None:
    entries = tenant.http.get("/v1/audit", params={"limit": 500}).json()["data"]
    assert {"user.invite", "account.enrol", "session.create"} <= {e["action"] for e in entries}


def test_passwords_and_tokens_are_nowhere(
    admin: Browser, owner: Browser, server: ServerUnderTest
) -> None:
    tokens = [each.http.cookies[COOKIE] for each in (admin, owner)]
    assert leaks(server.log.read_bytes(), tokens) == []
    assert leaks(database_bytes(server.settings), tokens) == []
    assert leaks(httpx.get(f"{server.url}/metrics").content, tokens) == []
    assert not set(leaks(repr(DOCUMENT).encode())) - {"lpx_join_" + "0" * 43}
