"""The client of an identity provider: its metadata, its keys, and the bounds of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import httpx
import pytest

from loraplex.api.contract.errors import ApiError
from loraplex.api.oidc.bounded_client import MAX_BYTES, BoundedClient
from loraplex.api.oidc.endpoint_url import is_endpoint_url
from loraplex.api.oidc.flow import Flow, Flows
from loraplex.api.oidc.provider import Provider
from loraplex.api.oidc.provider_config import ProviderConfig
from loraplex.api.oidc.role_rules import RoleRule, first_rule, parse_rules
from loraplex.api.oidc.signing_keys import MAX_AGE_SECONDS, MIN_REFRESH_SECONDS, SigningKeys
from loraplex.platform.errors import InvalidValue, SignInRejected
from loraplex.platform.keys.principal import OperatorRole, TenantRole
from support.identity_provider import (
    CLIENT_ID,
    CLIENT_SECRET,
    IdentityProvider,
    identity_provider,
    jwk_of,
)

Result = TypeVar("Result")
DISCOVERY = "/.well-known/openid-configuration"
REDIRECT = "https://console.example/console/sign-in/callback"


@pytest.fixture
def rogue() -> Iterator[IdentityProvider]:
    with identity_provider() as running:
        yield running


def asking(
    issuer: str,
    ask: Callable[[Provider], Coroutine[Any, Any, Result]],
    *,
    secret: str | None = CLIENT_SECRET,
    timeout_seconds: float = 5.0,
) -> Result:
    """What a server with this provider gets."""
    config = ProviderConfig(
        issuer=issuer,
        client_id=CLIENT_ID,
        client_secret=secret,
        scopes=("openid", "email"),
        name="Acme",
        groups_claim="groups",
        rules=(),
    )

    async def run() -> Result:
        client = BoundedClient(timeout_seconds=timeout_seconds)
        try:
            return await ask(Provider(config, client))
        finally:
            await client.aclose()

    return asyncio.run(run())


def begin() -> Flow:
    return Flows(b"s" * 32).begin()


async def authorize(provider: Provider) -> str:
    return await provider.authorization_url(begin(), REDIRECT, again=False)


# --- metadata -------------------------------------------------------------------------------------


def metadata_of(provider: IdentityProvider, **changes: Any) -> bytes:
    provider.metadata = changes
    return provider.answer("GET", DISCOVERY, {}, "")[2]  # type: ignore[no-any-return]


BAD_METADATA: dict[str, Callable[[IdentityProvider], tuple[int, dict[str, str], bytes]]] = {
    "too large": lambda p: (200, {}, metadata_of(p) + b" " * MAX_BYTES),
    "a redirect": lambda p: (302, {"location": f"{p.url}/keys"}, b""),
    "compressed": lambda p: (200, {"content-encoding": "gzip"}, metadata_of(p)),
    "not found": lambda p: (404, {}, b"{}"),
    "no JSON": lambda p: (200, {}, b"<html>"),
    "no object": lambda p: (200, {}, b"[]"),
    "deep": lambda p: (200, {}, b"[" * 100_000),
    "another issuer": lambda p: (200, {}, metadata_of(p, issuer="https://id.example")),
    "no issuer": lambda p: (200, {}, metadata_of(p, issuer=None)),
    "no token endpoint": lambda p: (200, {}, metadata_of(p, token_endpoint=None)),
    "keys over HTTP": lambda p: (200, {}, metadata_of(p, jwks_uri="http://id.example/keys")),
    "keys in a file": lambda p: (200, {}, metadata_of(p, jwks_uri="file:///etc/passwd")),
    "a script as address": lambda p: (
        *(200, {}),
        metadata_of(p, authorization_endpoint="javascript:alert(1)"),
    ),
    "a sign-out over HTTP": lambda p: (
        *(200, {}),
        metadata_of(p, end_session_endpoint="http://id.example/"),
    ),
}


@pytest.mark.parametrize("case", list(BAD_METADATA))
def test_bad_metadata_makes_the_provider_unavailable(case: str, rogue: IdentityProvider) -> None:
    rogue.answers[DISCOVERY] = BAD_METADATA[case](rogue)
    rogue.requests.clear()
    with pytest.raises(ApiError) as caught:
        asking(rogue.url, authorize)
    assert caught.value.code == "identity_provider_unavailable"
    assert rogue.requests == [DISCOVERY], "a redirect is not followed"


def test_a_provider_that_is_away_or_slow_is_unavailable(
    rogue: IdentityProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stall(*arguments: object) -> Any:
        time.sleep(0.5)
        return 200, {}, b"{}"

    monkeypatch.setattr(rogue, "answer", stall)
    for url in (rogue.url, "http://127.0.0.1:9"):
        with pytest.raises(ApiError, match="cannot be reached"):
            asking(url, authorize, timeout_seconds=0.1)


def test_metadata_is_fetched_once_and_a_failure_is_not_repeated_at_once(
    rogue: IdentityProvider,
) -> None:
    async def ask_often(provider: Provider) -> None:
        for _ in range(3):
            with suppress(ApiError):
                await authorize(provider)

    rogue.answers[DISCOVERY] = (500, {}, b"{}")
    asking(rogue.url, ask_often)
    assert rogue.requests == [DISCOVERY]
    del rogue.answers[DISCOVERY]
    asking(rogue.url, ask_often)
    assert rogue.requests == [DISCOVERY] * 2


def test_the_request_has_state_nonce_and_a_challenge_of_its_own(rogue: IdentityProvider) -> None:
    flow = begin()

    async def ask(provider: Provider) -> str:
        return await provider.authorization_url(flow, REDIRECT, again=False)

    rogue.metadata = {"authorization_endpoint": f"{rogue.url}/authorize?kept=1"}
    query = httpx.URL(asking(rogue.url, ask)).params
    assert dict(query) == {
        "kept": "1",
        "response_type": "code",
        "client_id": CLIENT_ID,
        "redirect_uri": REDIRECT,
        "scope": "openid email",
        "state": flow.state,
        "nonce": flow.nonce,
        "code_challenge": flow.challenge,
        "code_challenge_method": "S256",
    }
    others = begin()
    values = {flow.state, flow.nonce, flow.verifier, flow.challenge, flow.hash, flow.text}
    assert len(values | {others.state, others.nonce, others.verifier}) == 9


@pytest.mark.parametrize(
    "methods", [None, ["client_secret_basic"], ["client_secret_post", "private_key_jwt"]]
)
def test_the_clients_secret_is_sent_as_the_provider_wants_it(
    methods: list[str] | None, rogue: IdentityProvider
) -> None:
    if methods is not None:
        rogue.metadata = {"token_endpoint_auth_methods_supported": methods}

    async def sign_in(provider: Provider) -> str:
        flow = begin()
        url = await provider.authorization_url(flow, REDIRECT, again=False)
        sent = rogue.sign_in(url, sub="ada")
        return str((await provider.authenticate(flow, sent["code"], REDIRECT))["sub"])

    assert asking(rogue.url, sign_in) == "ada"
    with pytest.raises(ApiError, match="does not exchange"):
        asking(rogue.url, sign_in, secret="wrong")


def test_a_provider_without_a_sign_out_address_has_none(rogue: IdentityProvider) -> None:
    async def ask(provider: Provider) -> str | None:
        return await provider.sign_out_url("https://console.example/console/")

    rogue.answers[DISCOVERY] = (200, {}, metadata_of(rogue, end_session_endpoint=None))
    assert asking(rogue.url, ask) is None
    rogue.answers[DISCOVERY] = (500, {}, b"{}")
    assert asking(rogue.url, ask) is None


# --- keys -----------------------------------------------------------------------------------------


def test_unknown_keys_are_fetched_at_a_bounded_rate_and_withdrawn_ones_forgotten() -> None:
    now, published, num_fetches = 0.0, ["first"], 0

    async def fetch() -> dict[str, Any]:
        nonlocal num_fetches
        num_fetches += 1
        return {"keys": [jwk_of(name) for name in published]}

    keys = SigningKeys(fetch, clock=lambda: now)

    async def is_known(name: str) -> bool:
        with suppress(SignInRejected):
            return bool(await keys.find(name))
        return False

    async def run() -> None:
        nonlocal now, published
        assert await is_known("first")
        published = ["second"]
        for _ in range(10):
            assert not await is_known("second")
        assert num_fetches == 1
        now += MIN_REFRESH_SECONDS
        assert await is_known("second")
        assert not await is_known("first")
        assert num_fetches == 2
        published = []
        now += MAX_AGE_SECONDS
        assert not await is_known("second")

    asyncio.run(run())


def test_a_token_without_a_key_id_uses_the_only_key() -> None:
    async def fetch() -> dict[str, Any]:
        return {"keys": [jwk_of("first"), {"kty": "oct", "k": "AAAA"}]}

    assert asyncio.run(SigningKeys(fetch).find(None)).kid == "first"


@pytest.mark.parametrize("content", [{}, {"keys": None}, {"keys": {}}, {"keys": [1, None, []]}])
def test_a_malformed_key_set_has_no_key(content: dict[str, Any]) -> None:
    async def fetch() -> dict[str, Any]:
        return content

    with pytest.raises(SignInRejected):
        asyncio.run(SigningKeys(fetch).find("first"))


# --- flows ----------------------------------------------------------------------------------------


def test_a_flow_ends_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    flows = Flows(b"s" * 32)
    flow = flows.begin()
    assert flows.parse(flow.text) == flow
    assert Flows(b"t" * 32).parse(flow.text) is None, "of another installation"
    monkeypatch.setattr("time.time", lambda: float(flow.expires_at))
    assert flows.parse(flow.text) is None


@pytest.mark.parametrize(
    "text", ["", ".", "lpx_flow_", "lpx_flow_1.x.y", "\N{SNOWMAN}.x", "x" * 300]
)
def test_other_texts_are_no_flows(text: str) -> None:
    assert Flows(b"s" * 32).parse(text) is None


# --- settings -------------------------------------------------------------------------------------


def test_rules_keep_their_order_and_the_first_decides() -> None:
    rules = parse_rules(
        '{"cn=a,ou=b": "acme:owner", "sre": "@operators:admin", "b": "bolt:viewer"}'
    )
    assert rules == (
        RoleRule("cn=a,ou=b", "acme", TenantRole.OWNER),
        RoleRule("sre", None, OperatorRole.ADMIN),
        RoleRule("b", "bolt", TenantRole.VIEWER),
    )
    assert first_rule(rules, {"b", "sre"}) == rules[1]
    assert first_rule(rules, {"B", "acme:owner", ""}) is None
    assert parse_rules("{}") == ()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "[1]", "x", "[" * 100_000),
        *('{"g": null}', '{"g": 1}', '{"g": {}}', '{"g": "acme"}', '{"g": "acme:"}'),
        *('{"g": ":owner"}', '{"g": "acme:admin"}', '{"g": "@operators:owner"}'),
        *('{"g": "Acme:owner"}', '{"g": "a:admin:x"}', '{"g": "@operators"}'),
        '{"g": "acme:owner "}',
    ],
)
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_rules(text)


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        ("https://id.example.com/realms/acme", True),
        ("http://127.0.0.1:8080", True),
        ("http://localhost", True),
        ("http://[::1]:1/x", True),
        ("http://id.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("https://user@id.example.com", False),
        ("https://id.example.com#x", False),
        ("https://id.example.com:x", False),
        ("https:///x", False),
        ("ftp://id.example.com", False),
        ("https://id.example.com/a b", False),
        (None, False),
    ],
)
def test_endpoints_use_https_or_stay_on_this_machine(url: object, is_one: bool) -> None:
    assert is_endpoint_url(url) is is_one
