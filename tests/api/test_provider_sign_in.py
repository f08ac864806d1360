"""Sign-in through an identity provider over the API: who is admitted, and every refusal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api import cli
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.platform.base import utc_now
from support.browser import Browser
from support.envelopes import check_envelope
from support.identity_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    IdentityProvider,
    half_hash,
    identity_provider,
    make_token,
)
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, serving

RULES = {
    "sre": "@operators:admin",
    "watch": "@operators:viewer",
    "cn=ml,ou=teams": "oidc:developer",
    "leads": "oidc:owner",
    "visitors": "oidc:viewer",
    "lost": "no-such-tenant:viewer",
}
FLOW = "loraplex_flow"


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as running:
        yield running


@pytest.fixture(autouse=True)
def honest(provider: IdentityProvider) -> Iterator[None]:
    """What one test tells the provider to do wrong ends with it."""
    yield
    provider.header, provider.claims = {}, {}
    provider.signed_by, provider.spoil = "first", lambda token: token
    provider.answers = {}


@pytest.fixture(scope="module")
def oidc_server(
    provider: IdentityProvider, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    settings = {
        "LORAPLEX_OIDC_ISSUER": provider.url,
        "LORAPLEX_OIDC_CLIENT_ID": CLIENT_ID,
        "LORAPLEX_OIDC_CLIENT_SECRET": CLIENT_SECRET,
        "LORAPLEX_OIDC_NAME": "Acme",
        "LORAPLEX_OIDC_ROLES": json.dumps(RULES),
        "LORAPLEX_TRUSTED_PROXIES": "127.0.0.1/32",
    }
    folder = tmp_path_factory.mktemp("oidc")
    with serving(tiny_base, folder, engine=FAKE_ENGINE, **settings) as running:
        yield running
    for secret in (CLIENT_SECRET, "lpx_flow_"):
        assert secret not in (folder / "server.log").read_text()


@pytest.fixture(scope="module")
def acme(oidc_server: ServerUnderTest) -> Caller:
    """The tenant of the rules."""
    return oidc_server.make_caller("oidc")


@pytest.fixture(scope="module")
def operator_key(oidc_server: ServerUnderTest) -> str:
    return oidc_server.make_operator("local")


class Person:
    """A person at a browser, who signs in at the provider."""

    def __init__(self, server: ServerUnderTest, provider: IdentityProvider, claims: Any) -> None:
        self.browser = Browser(server.url)
        self.http = self.browser.http
        self._provider = provider
        self._claims = claims

    def begin(self, **body: Any) -> str:
        """Begin to sign in; the provider's address."""
        answer = self.http.post("/v1/session/oidc", json=body)
        assert answer.is_success, answer.text
        url: str = answer.json()["url"]
        return url

    def authorize(self, **body: Any) -> dict[str, str]:
        """The parameters with which the provider sends the browser back."""
        return self._provider.sign_in(self.begin(**body), **self._claims)

    def come_back(self, sent: Mapping[str, str], **headers: str) -> httpx.Response:
        answer = self.http.post("/v1/session/oidc/callback", json=sent, headers=headers)
        if answer.is_success:
            self.http.headers["x-csrf-token"] = answer.json()["csrf_token"]
        return answer

    def sign_in(self, **body: Any) -> httpx.Response:
        return self.come_back(self.authorize(**body))


Visit = Callable[..., Person]


@pytest.fixture
def visit(
    oidc_server: ServerUnderTest, acme: Caller, provider: IdentityProvider
) -> Iterator[Visit]:
    """Opens a browser for a person with these claims."""
    with ExitStack() as stack:

        def open_one(subject: str, *groups: str, **claims: Any) -> Person:
            given = {"sub": subject, "email": f"{subject}@acme.example", "groups": list(groups)}
            person = Person(oidc_server, provider, {**given, **claims})
            stack.enter_context(person.http)
            return person

        yield open_one


def users_of(acme: Caller) -> dict[str, dict[str, Any]]:
    return {user["email"]: user for user in acme.http.get("/v1/users").json()["data"]}


def audit_of(server: ServerUnderTest, key: str) -> list[dict[str, Any]]:
    """The platform's audit log."""
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{server.url}/admin/audit", params={"limit": 500}, headers=headers)
    entries: list[dict[str, Any]] = answer.json()["data"]
    return entries


# --- who is admitted ------------------------------------------------------------------------------


def test_the_server_says_which_provider_it_has(oidc_server: ServerUnderTest) -> None:
    answer = httpx.get(f"{oidc_server.url}/v1/session/oidc").json()
    assert answer == {"name": "Acme", "object": "identity_provider"}


def test_the_first_sign_in_adds_a_user_with_the_role_of_the_group(
    visit: Visit, acme: Caller
) -> None:
    ada = visit("ada", "everybody", "cn=ml,ou=teams")
    session = ada.sign_in().json()
    assert (session["kind"], session["name"]) == ("user", "ada@acme.example")
    assert (session["tenant"], session["role"]) == ("oidc", "developer")
    assert session["signed_in_with"] == "provider"
    assert session["server"]["tuning"] is False
    assert ada.http.get("/v1/session").json()["name"] == "ada@acme.example"
    assert ada.http.get("/v1/adapters").is_success
    added = users_of(acme)["ada@acme.example"]
    entries = acme.http.get("/v1/audit", params={"limit": 500}).json()["data"]
    (created,) = (
        e for e in entries if e["action"] == "user.create" and e["resource"] == added["id"]
    )
    assert created["details"]["subject"] == "ada"


def test_a_later_sign_in_finds_the_user_by_subject_and_sets_the_role_anew(
    visit: Visit, acme: Caller
) -> None:
    assert visit("ben", "cn=ml,ou=teams").sign_in().json()["role"] == "developer"
    before = users_of(acme)
    moved = visit("ben", "visitors", email="benjamin@acme.example").sign_in().json()
    assert (moved["name"], moved["role"]) == ("ben@acme.example", "viewer")
    after = users_of(acme)
    assert after.keys() == before.keys()
    assert after["ben@acme.example"]["role"] == "viewer"


def test_the_first_rule_that_fits_decides(visit: Visit) -> None:
    assert visit("cy", "visitors", "leads").sign_in().json()["role"] == "owner"


def test_a_group_may_be_one_text(visit: Visit) -> None:
    assert visit("dora", groups="visitors").sign_in().json()["role"] == "viewer"


def test_a_group_that_is_mapped_to_operators_makes_an_operator(
    visit: Visit, request: pytest.FixtureRequest
) -> None:
    eve = visit("eve", "sre")
    session = eve.sign_in().json()
    assert (session["kind"], session["role"]) == ("operator", "admin")
    assert session["name"] == "eve.acme.example"
    assert eve.http.get("/admin/tenants").is_success
    check_envelope(visit("eve", "watch").sign_in(), "last_administrator")
    request.getfixturevalue("operator_key")
    assert visit("eve", "watch").sign_in().json()["role"] == "viewer"


def test_a_recent_authentication_confirms_the_session(visit: Visit) -> None:
    stale = visit("flo", "leads", auth_time=int(time.time()) - 660)
    stale.sign_in().raise_for_status()
    check_envelope(stale.http.post("/v1/keys", json={}), "confirmation_required")
    url = stale.begin(again=True)
    assert "prompt=login" in url
    assert "max_age=0" in url
    fresh = visit("flo", "leads", auth_time=int(time.time()) + 3600)
    fresh.sign_in(again=True).raise_for_status()
    check_envelope(fresh.http.post("/v1/keys", json={}), "invalid_parameter", "name")
    until = datetime.fromisoformat(fresh.http.get("/v1/session").json()["confirmed_until"])
    assert until <= utc_now() + timedelta(minutes=10), "a time in the future does not extend it"
    for odd in (float("nan"), float("inf"), 10**400, -1, "now", True):
        assert visit("flo", "leads", auth_time=odd).sign_in().is_success
    check_envelope(
        fresh.http.post("/v1/session/confirmation", json={"password": "x"}), "sign_in_failed"
    )


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
def test_the_usual_algorithms_are_accepted(
    algorithm: str, visit: Visit, provider: IdentityProvider
) -> None:
    kid = {"ES256": "ec", "EdDSA": "ed"}.get(algorithm, "first")
    provider.header = {"alg": algorithm, "kid": kid}
    assert visit("gil", "visitors").sign_in().is_success


def test_sign_out_ends_the_session_and_says_where_the_providers_ends(
    visit: Visit, provider: IdentityProvider, oidc_server: ServerUnderTest
) -> None:
    hal = visit("hal", "visitors")
    hal.sign_in().raise_for_status()
    url = httpx.URL(hal.http.get("/v1/session/oidc/sign-out").json()["url"])
    assert str(url).startswith(f"{provider.url}/end?from=metadata&")
    assert url.params["client_id"] == CLIENT_ID
    assert url.params["post_logout_redirect_uri"] == f"{oidc_server.url}/console/"
    kept = hal.browser.headers
    assert hal.http.delete("/v1/session").status_code == 204
    check_envelope(httpx.get(f"{oidc_server.url}/v1/session", headers=kept), "session_ended")


def test_the_flow_is_bound_to_the_browser_by_a_cookie(
    visit: Visit, provider: IdentityProvider
) -> None:
    ida = visit("ida", "visitors")
    answer = ida.http.post("/v1/session/oidc", json={})
    name, *attributes = answer.headers["set-cookie"].lower().split("; ")
    assert name.startswith(f"{FLOW}=lpx_flow_")
    assert set(attributes) == {"httponly", "samesite=strict", "path=/", "max-age=600"}
    back = ida.come_back(
        provider.sign_in(
            answer.json()["url"], sub="ida", groups="visitors", email="ida@acme.example"
        )
    )
    assert back.is_success
    assert FLOW not in ida.http.cookies, "and it ends with the sign-in"


def test_behind_a_proxy_with_tls_the_redirect_uri_is_https_and_the_cookies_are_secure(
    oidc_server: ServerUnderTest, acme: Caller, provider: IdentityProvider
) -> None:
    sent = {
        "host": "console.example",
        "origin": "https://console.example",
        "x-forwarded-for": "192.0.2.7",
        "x-forwarded-proto": "https",
    }
    with httpx.Client(base_url=oidc_server.url, headers=sent) as http:
        begun = http.post("/v1/session/oidc", json={})
        url = httpx.URL(begun.json()["url"])
        assert url.params["redirect_uri"] == "https://console.example/console/sign-in/callback"
        flow, *attributes = begun.headers["set-cookie"].lower().split("; ")
        assert flow.startswith("__host-loraplex-flow=")
        assert "secure" in attributes
        claims = {"sub": "jo", "email": "jo@acme.example", "groups": "visitors"}
        body = provider.sign_in(str(url), **claims)
        cookie = begun.headers["set-cookie"].partition(";")[0]
        answer = http.post("/v1/session/oidc/callback", json=body, headers={"cookie": cookie})
        assert answer.is_success, answer.text
        session, cleared = answer.headers.get_list("set-cookie")
        assert session.startswith("__Host-loraplex=lpx_session_")
        assert "Secure" in session
        assert cleared.startswith('__Host-loraplex-flow=""')


# --- refusals -------------------------------------------------------------------------------------

Change = Callable[[IdentityProvider], None]


def with_claims(**claims: Any) -> Change:
    return lambda provider: provider.claims.update(claims)


def with_header(**header: Any) -> Change:
    return lambda provider: provider.header.update(header)


def with_key(name: str, **header: Any) -> Change:
    def change(provider: IdentityProvider) -> None:
        provider.signed_by = name
        provider.header = header

    return change


def with_spoilt(spoil: Callable[[str], str]) -> Change:
    def change(provider: IdentityProvider) -> None:
        provider.spoil = spoil

    return change


def another_payload(token: str) -> str:
    """The token with the payload of another, so that its signature is of the first."""
    header, _, signature = token.split(".")
    return f"{header}.{make_token({'sub': 'root'}, {'alg': 'none'}, '').split('.')[1]}.{signature}"


def past(seconds: float) -> int:
    return int(time.time() - seconds)


WRONG_TOKENS: dict[str, tuple[Change, str]] = {
    "signed by a stranger": (with_key("stranger", kid="first"), "signature"),
    "another payload": (with_spoilt(another_payload), "signature"),
    "no signature": (with_spoilt(lambda token: token.rpartition(".")[0] + "."), "signature"),
    "no algorithm": (with_header(alg="none"), "algorithm"),
    "the public key as a shared one": (with_header(alg="HS256"), "algorithm"),
    "a shared key that is published": (with_header(alg="HS256", kid="shared"), "algorithm"),
    "a key of another type": (with_header(kid="ec"), "signature"),
    "a weak key": (with_key("weak"), "unknown"),
    "a key for encryption": (with_key("encryption"), "unknown"),
    "an unknown key": (with_key("second"), "unknown"),
    "no key named, of several": (with_header(kid=None), "malformed|unknown"),
    "a key that is no name": (with_header(kid=["first"]), "malformed"),
    "no token": (with_spoilt(lambda token: "x"), "malformed"),
    "a long token": (with_claims(padding="x" * 70_000), "too long"),
    "another issuer": (with_claims(iss="https://id.example"), "issuer"),
    "no issuer": (with_claims(iss=None), "issuer"),
    "another audience": (with_claims(aud="another"), "another client"),
    "no audience": (with_claims(aud=None), "another client"),
    "two audiences and no party": (with_claims(aud=[CLIENT_ID, "another"]), "another client"),
    "another party": (with_claims(azp="another"), "another client"),
    "no subject": (with_claims(sub=None), "subject"),
    "a subject that is no text": (with_claims(sub=7), "subject"),
    "a subject with a NUL": (with_claims(sub="a\0"), "subject"),
    "a long subject": (with_claims(sub="x" * 256), "subject"),
    "expired": (lambda provider: provider.claims.update(exp=past(61)), "expired"),
    "no expiry": (with_claims(exp=None), "time"),
    "an expiry that is no number": (with_claims(exp="never"), "time"),
    "not a number": (with_claims(exp=float("nan")), "expired"),
    "issued in the future": (lambda provider: provider.claims.update(iat=past(-90)), "yet"),
    "not yet valid": (lambda provider: provider.claims.update(nbf=past(-90)), "yet"),
    "another nonce": (with_claims(nonce="0" * 64), "nonce"),
    "no nonce": (with_claims(nonce=None), "nonce"),
    "another access token": (with_claims(at_hash=half_hash("another")), "access token"),
    "a hash that is no text": (with_claims(at_hash=1), "access token"),
}


@pytest.mark.parametrize("case", list(WRONG_TOKENS))
def test_a_wrong_token_is_rejected(
    case: str, visit: Visit, acme: Caller, provider: IdentityProvider
) -> None:
    person, (change, reason) = visit("mallory", "leads"), WRONG_TOKENS[case]
    change(provider)
    error = check_envelope(person.sign_in(), "sign_in_rejected")
    assert re.search(reason, error["message"].partition("Reason: ")[2])
    assert "mallory@acme.example" not in users_of(acme)
    assert "loraplex_session" not in person.http.cookies


def test_a_header_of_the_providers_own_is_ignored_unless_it_is_critical(
    visit: Visit, provider: IdentityProvider
) -> None:
    provider.header = {"x-own": "1"}
    assert visit("kit", "visitors").sign_in().is_success
    provider.header = {"x-own": "1", "crit": ["x-own"]}
    check_envelope(visit("kit", "visitors").sign_in(), "sign_in_rejected")


def test_a_small_difference_of_the_clocks_is_tolerated(
    visit: Visit, provider: IdentityProvider
) -> None:
    provider.claims = {"exp": past(30), "iat": past(-30)}
    assert visit("kim", "visitors").sign_in().is_success


def test_a_state_works_once(visit: Visit, provider: IdentityProvider) -> None:
    lea = visit("lea", "visitors")
    sent = lea.authorize()
    cookie = f"{FLOW}={lea.http.cookies[FLOW]}"
    assert lea.come_back(sent).is_success
    num_requests = len(provider.requests)
    error = check_envelope(lea.come_back(sent, cookie=cookie), "sign_in_rejected")
    assert "before" in error["message"]
    assert len(provider.requests) == num_requests, "its code is not sent again"


def test_a_state_that_failed_cannot_be_used_again(visit: Visit, provider: IdentityProvider) -> None:
    lea = visit("lea", "visitors")
    sent = lea.authorize()
    wrong = {**sent, "code": "guessed"}
    assert "refuses the code" in lea.come_back(wrong).json()["error"]["message"]
    check_envelope(lea.come_back(sent), "sign_in_rejected")


def test_a_state_of_another_browser_is_rejected(visit: Visit) -> None:
    attacker, victim = visit("mia", "visitors"), visit("ned", "visitors")
    sent = attacker.authorize()
    for _ in ("without a flow of its own", "with one"):
        error = check_envelope(victim.come_back(sent), "sign_in_rejected")
        assert "another browser" in error["message"]
        victim.begin()


def test_a_flow_that_the_server_did_not_begin_is_rejected(visit: Visit) -> None:
    ola = visit("ola", "visitors")
    sent = ola.authorize()
    real = ola.http.cookies[FLOW]
    expires_at, random, signature = real.removeprefix("lpx_flow_").split(".")
    for forged in (
        f"lpx_flow_{int(expires_at) + 1}.{random}.{signature}",
        f"lpx_flow_{expires_at}.{random}.{'0' * 64}",
        "lpx_flow_x",
        "x" * 10_000,
    ):
        answer = httpx.post(
            f"{ola.http.base_url}/v1/session/oidc/callback",
            json=sent,
            headers={"cookie": f"{FLOW}={forged}"},
        )
        check_envelope(answer, "sign_in_rejected")
    assert ola.come_back(sent).is_success


def test_a_code_works_once(visit: Visit) -> None:
    pia = visit("pia", "visitors")
    sent = pia.authorize()
    assert pia.come_back(sent).is_success
    again = {"code": sent["code"], "state": pia.authorize()["state"]}
    error = check_envelope(pia.come_back(again), "sign_in_rejected")
    assert "refuses the code" in error["message"]


def test_a_code_of_another_flow_fails_at_pkce(visit: Visit, provider: IdentityProvider) -> None:
    """An attacker who has intercepted a code has not the verifier."""
    victim, attacker = visit("quinn", "visitors"), visit("rob", "visitors")
    stolen = victim.authorize()["code"]
    own = attacker.authorize()["state"]
    error = check_envelope(attacker.come_back({"code": stolen, "state": own}), "sign_in_rejected")
    assert "refuses the code" in error["message"]


def test_people_without_a_mapped_group_are_refused_and_audited(
    visit: Visit, acme: Caller, oidc_server: ServerUnderTest, operator_key: str
) -> None:
    for groups in ([], ["admin"], ["lost"], ["leads "], [{"leads": 1}]):
        person = visit("sam", groups=groups)
        check_envelope(person.sign_in(), "identity_not_mapped")
        assert "loraplex_session" not in person.http.cookies
    check_envelope(visit("sam", groups={"leads": True}).sign_in(), "identity_not_mapped")
    assert "sam@acme.example" not in users_of(acme)
    refused = [
        entry["details"]
        for entry in audit_of(oidc_server, operator_key)
        if entry["action"] == "session.refuse"
    ]
    assert refused.count({**refused[0], "subject": "sam", "code": "identity_not_mapped"}) == 6


def test_a_disabled_user_is_refused_until_it_is_enabled(visit: Visit, acme: Caller) -> None:
    tess = visit("tess", "visitors")
    tess.sign_in().raise_for_status()
    user = users_of(acme)["tess@acme.example"]
    acme.http.patch(f"/v1/users/{user['id']}", json={"disabled": True}).raise_for_status()
    check_envelope(tess.http.get("/v1/session"), "session_ended")
    check_envelope(tess.sign_in(), "account_disabled")
    acme.http.patch(f"/v1/users/{user['id']}", json={"disabled": False}).raise_for_status()
    assert tess.sign_in().is_success


def test_a_disabled_operator_is_refused(
    visit: Visit, oidc_server: ServerUnderTest, operator_key: str
) -> None:
    uma = visit("uma", "watch")
    uma.sign_in().raise_for_status()
    headers = {"authorization": f"Bearer {operator_key}"}
    url = f"{oidc_server.url}/admin/operators/uma.acme.example"
    httpx.patch(url, json={"disabled": True}, headers=headers).raise_for_status()
    check_envelope(uma.sign_in(), "account_disabled")


def test_an_address_never_selects_an_existing_user(visit: Visit, acme: Caller) -> None:
    body = {"email": "boss@acme.example", "role": "owner"}
    boss = acme.http.post("/v1/users", json=body).json()
    for email in ("boss@acme.example", "Boss@Acme.example"):
        check_envelope(visit("val", "visitors", email=email).sign_in(), "identity_conflict")
    assert users_of(acme)["boss@acme.example"] == boss


def test_a_linked_person_signs_in_as_the_user(visit: Visit, acme: Caller) -> None:
    body = {"email": "lin@acme.example", "role": "viewer"}
    user = acme.http.post("/v1/users", json=body).json()
    path = f"/v1/users/{user['id']}/identity"
    check_envelope(acme.http.get(path), "identity_not_found")
    check_envelope(acme.http.delete(path), "identity_not_found")
    lin = visit("lin", "leads")
    check_envelope(lin.sign_in(), "identity_conflict")
    linked = acme.http.put(path, json={"subject": "lin"})
    assert linked.json() == acme.http.get(path).json()
    assert acme.http.put(path, json={"subject": "lin"}).json() == linked.json()
    session = lin.sign_in().json()
    assert (session["name"], session["role"]) == ("lin@acme.example", "owner")
    other = acme.http.post("/v1/users", json={"email": "o@acme.example", "role": "viewer"}).json()
    taken = acme.http.put(f"/v1/users/{other['id']}/identity", json={"subject": "lin"})
    check_envelope(taken, "identity_conflict")
    assert acme.http.delete(path).status_code == 204
    check_envelope(lin.http.get("/v1/session"), "session_ended")
    check_envelope(lin.sign_in(), "identity_conflict")
    entries = acme.http.get("/v1/audit", params={"resource": user["id"]}).json()["data"]
    actions = [entry["action"] for entry in entries]
    assert [actions.count(action) for action in ("user.link", "user.unlink")] == [1, 1]


def test_a_command_links_and_unlinks_a_user(
    acme: Caller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"XDG_CONFIG_HOME": str(tmp_path), "LORAPLEX_URL": acme.url}
    for name, value in {**variables, "LORAPLEX_API_KEY": acme.key}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["loraplex", "users", *arguments])
        try:
            return cli.main()
        except SystemExit as exc:
            return int(exc.code or 0)

    user = acme.http.post("/v1/users", json={"email": "cli@acme.example", "role": "viewer"}).json()
    path = f"/v1/users/{user['id']}/identity"
    assert run("unlink", "cli@acme.example") == ExitCode.NOT_FOUND
    assert run("link", "cli@acme.example", "cli-1") == 0
    assert "cli-1" in capsys.readouterr().out
    assert acme.http.get(path).json()["subject"] == "cli-1"
    assert run("unlink", "cli@acme.example") == 0
    check_envelope(acme.http.get(path), "identity_not_found")


def test_a_linked_person_signs_in_as_the_operator(
    visit: Visit, oidc_server: ServerUnderTest, operator_key: str
) -> None:
    headers = {"authorization": f"Bearer {operator_key}"}
    with httpx.Client(base_url=oidc_server.url, headers=headers) as http:
        for name in ("olga.acme.example", "other-of-olga"):
            http.post("/admin/operators", json={"name": name}).raise_for_status()
        path = "/admin/operators/olga.acme.example/identity"
        check_envelope(http.get(path), "identity_not_found")
        check_envelope(http.delete(path), "identity_not_found")
        olga = visit("olga", "watch")
        check_envelope(olga.sign_in(), "identity_conflict")
        linked = http.put(path, json={"subject": "olga"})
        assert linked.json() == http.get(path).json()
        assert http.put(path, json={"subject": "olga"}).json() == linked.json()
        assert olga.sign_in().json()["name"] == "olga.acme.example"
        taken = http.put("/admin/operators/other-of-olga/identity", json={"subject": "olga"})
        check_envelope(taken, "identity_conflict")
        assert http.delete(path).status_code == 204
        check_envelope(olga.http.get("/v1/session"), "session_ended")
        check_envelope(olga.sign_in(), "identity_conflict")
        own = "/admin/operators/local/identity"
        check_envelope(http.put(own, json={"subject": "me"}), "own_account")
        check_envelope(http.delete(own), "own_account")
        check_envelope(
            http.put("/admin/operators/nobody/identity", json={"subject": "x"}),
            "operator_not_found",
        )
    actions = [entry["action"] for entry in audit_of(oidc_server, operator_key)]
    assert [actions.count(action) for action in ("operator.link", "operator.unlink")] == [1, 1]


def test_a_command_links_and_unlinks_an_operator(
    oidc_server: ServerUnderTest,
    operator_key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"XDG_CONFIG_HOME": str(tmp_path), "LORAPLEX_URL": oidc_server.url}
    for name, value in {**variables, "LORAPLEX_API_KEY": operator_key}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["loraplex", "operators", *arguments])
        try:
            return cli.main()
        except SystemExit as exc:
            return int(exc.code or 0)

    assert run("add", "by-command") == 0
    assert run("unlink", "by-command") == ExitCode.NOT_FOUND
    assert run("link", "by-command", "by-command-1") == 0
    assert "by-command-1" in capsys.readouterr().out
    assert run("unlink", "by-command") == 0


def test_only_who_has_the_users_permissions_can_link_it(visit: Visit, acme: Caller) -> None:
    user = acme.http.post("/v1/users", json={"email": "p@acme.example", "role": "owner"}).json()
    path = f"{acme.url}/v1/users/{user['id']}/identity"
    body = {"name": "narrow", "scopes": ["users:manage"]}
    key = acme.http.post("/v1/keys", json=body).json()["key"]
    narrow = {"authorization": f"Bearer {key}"}
    answer = httpx.put(path, json={"subject": "p"}, headers=narrow)
    check_envelope(answer, "grant_too_wide", "role")
    check_envelope(httpx.delete(path, headers=narrow), "grant_too_wide", "role")
    lead = visit("pat", "leads", auth_time=int(time.time()) - 3600)
    lead.sign_in().raise_for_status()
    check_envelope(lead.http.put(path, json={"subject": "p"}), "confirmation_required")


@pytest.mark.parametrize(
    "claims",
    [
        {"email": None},
        {"email": 7},
        {"email": "not an address"},
        {"email_verified": False},
        {"email_verified": "true"},
    ],
)
def test_a_new_user_needs_a_verified_address(
    claims: dict[str, Any], visit: Visit, acme: Caller
) -> None:
    check_envelope(visit("wes", "visitors", **claims).sign_in(), "identity_conflict")


def test_users_of_a_suspended_tenant_are_refused(
    visit: Visit, oidc_server: ServerUnderTest, operator_key: str
) -> None:
    headers = {"authorization": f"Bearer {operator_key}"}
    url = f"{oidc_server.url}/admin/tenants/oidc"
    httpx.patch(url, json={"suspended": True}, headers=headers).raise_for_status()
    try:
        check_envelope(visit("xi", "visitors").sign_in(), "tenant_suspended")
    finally:
        httpx.patch(url, json={"suspended": False}, headers=headers).raise_for_status()


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/token", (302, {"location": "/token2"}, b"")),
        ("/token", (200, {}, b"{" + b" " * 300_000 + b"}")),
        ("/token", (200, {}, b"[]")),
        ("/token", (200, {"content-encoding": "gzip"}, b"{}")),
        ("/token", (500, {}, b"{}")),
        ("/token", (401, {}, b'{"error": "invalid_client"}')),
    ],
)
def test_a_provider_that_does_not_answer_as_it_should_is_unavailable(
    path: str, answer: Any, visit: Visit, provider: IdentityProvider
) -> None:
    person = visit("yan", "visitors")
    sent = person.authorize()
    provider.answers[path] = answer
    check_envelope(person.come_back(sent), "identity_provider_unavailable")


def test_other_pages_can_neither_begin_nor_finish_a_sign_in(visit: Visit) -> None:
    zoe = visit("zoe", "visitors")
    sent = zoe.authorize()
    foreign = {"origin": "https://evil.example"}
    check_envelope(zoe.come_back(sent, **foreign), "csrf_failed")
    check_envelope(zoe.http.post("/v1/session/oidc", json={}, headers=foreign), "csrf_failed")
    assert zoe.come_back(sent).is_success


def test_nobody_signs_in_over_plain_http_from_elsewhere(oidc_server: ServerUnderTest) -> None:
    headers = {"host": "console.example", "x-forwarded-proto": "http"}
    for path, body in (("", {}), ("/callback", {"code": "x", "state": "x"})):
        url = f"{oidc_server.url}/v1/session/oidc{path}"
        check_envelope(httpx.post(url, json=body, headers=headers), "insecure_transport")


def test_the_settings_hide_the_clients_secret(
    oidc_server: ServerUnderTest, operator_key: str
) -> None:
    headers = {"authorization": f"Bearer {operator_key}"}
    answer = httpx.get(f"{oidc_server.url}/admin/settings", headers=headers)
    shown = {each["name"]: each["value"] for each in answer.json()["data"]}
    assert shown["LORAPLEX_OIDC_CLIENT_SECRET"] == "set"
    assert shown["LORAPLEX_OIDC_CLIENT_ID"] == CLIENT_ID
    assert CLIENT_SECRET not in answer.text
