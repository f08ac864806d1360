"""Sign-in through a real OpenID provider, in Chromium: over HTTP, HTTPS, and behind a proxy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from sqlalchemy import update

from loraplex.platform.accounts.models import AccountSession
from support.accessibility import grave_violations
from support.console import PASSWORD
from support.orphans import ending_with_this_process
from support.server import FAKE_ENGINE, ServerUnderTest, free_port, serving
from support.tools import need_program
from support.waiting import wait_for
from support.webhooks import make_certificates

CADDYFILE = Path(__file__).parents[2] / "deploy" / "compose" / "Caddyfile"
PEOPLE = [
    {"sub": "ada-1", "email": "ada@acme.example", "groups": ["ml"]},
    {"sub": "root-1", "email": "root@acme.example", "groups": ["sre"]},
    {"sub": "guest-1", "email": "guest@acme.example", "groups": []},
]
RULES = {"ml": "acme:owner", "sre": "@operators:admin"}


@contextmanager
def running(command: list[str], url: str, **environment: str) -> Iterator[str]:
    """A program that answers at this URL until the block is left."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def is_up() -> bool:
        assert process.poll() is None, f"{command[0]} has ended"
        try:
            return httpx.get(url, verify=False).status_code < 500
        except httpx.TransportError:
            return False

    with ending_with_this_process(process):
        try:
            wait_for(is_up, seconds=60)
            yield url
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """The issuer."""
    port = str(free_port())
    # It imports a module of Authlib that is deprecated.
    command = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "--port", port]
    for person in PEOPLE:
        command += ["--user-claims", json.dumps(person)]
    with running(command, f"http://127.0.0.1:{port}", PYTHONWARNINGS="ignore") as url:
        yield url


def sign_in_settings(issuer: str) -> dict[str, str]:
    return {
        "LORAPLEX_OIDC_ISSUER": issuer,
        "LORAPLEX_OIDC_CLIENT_ID": "console",
        "LORAPLEX_OIDC_CLIENT_SECRET": "any secret is accepted",
        "LORAPLEX_OIDC_NAME": "Acme ID",
        "LORAPLEX_OIDC_ROLES": json.dumps(RULES),
    }


@pytest.fixture(scope="module")
def oidc_server(
    provider: str, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerUnderTest]:
    settings = {**sign_in_settings(provider), "LORAPLEX_TRUSTED_PROXIES": "127.0.0.1/32"}
    folder = tmp_path_factory.mktemp("oidc-console")
    with serving(tiny_base, folder, engine=FAKE_ENGINE, **settings) as server:
        server.make_caller("acme")
        yield server


@pytest.fixture(scope="module")
def proxy(oidc_server: ServerUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The compose file's proxy in front of the server, with a certificate of its own."""
    caddy = need_program("caddy", package="caddy")
    folder = str(tmp_path_factory.mktemp("caddy"))
    port = free_port()
    variables = {
        "PROXY_HTTP_PORT": str(free_port()),
        "PROXY_HTTPS_PORT": str(port),
        "PROXY_UPSTREAM": urlsplit(oidc_server.url).netloc,
        "XDG_DATA_HOME": folder,
        "XDG_CONFIG_HOME": folder,
    }
    command = [caddy, "run", "--config", str(CADDYFILE)]
    with running(command, f"https://localhost:{port}", **variables) as url:
        yield url


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(ignore_https_errors=True, locale="en-GB")
    context.set_default_timeout(15_000)
    yield context
    context.close()


def sign_in(page: Page, url: str, subject: str) -> None:
    """From the console to the provider and back."""
    page.goto(f"{url}/console/")
    page.get_by_role("button", name="Sign in with Acme ID").click()
    page.get_by_role("button", name=subject).click()
    page.wait_for_url(f"{url}/console/**")


def create_key(page: Page) -> None:
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill("ci")
    page.get_by_role("button", name="Create key").click()


def end_confirmations(server: ServerUnderTest, context: BrowserContext) -> None:
    """As if ten minutes had passed since people signed in, and the server had noticed."""
    database = server.database
    with database.platform_transaction() as session:
        session.execute(update(AccountSession).values(confirmed_until=None))
    database.close()
    session_url = f"{server.url}/v1/session"
    wait_for(lambda: context.request.get(session_url).json()["confirmed_until"] is None, seconds=10)


def names_of_cookies(context: BrowserContext, url: str) -> set[str]:
    return {cookie["name"] for cookie in context.cookies(url)}


def test_a_person_signs_in_and_out_with_the_companys_account(
    context: BrowserContext, oidc_server: ServerUnderTest, provider: str
) -> None:
    page, url = context.new_page(), oidc_server.url
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"{url}/console/usage")
    expect(page.get_by_role("button", name="Sign in with Acme ID")).to_be_visible()
    assert grave_violations(page) == []
    page.get_by_role("button", name="Sign in with Acme ID").click()
    page.get_by_role("button", name="ada-1").click()
    page.wait_for_url(f"{url}/console/usage")
    expect(page.get_by_role("link", name=re.compile("ada@acme.example"))).to_be_visible()
    expect(page.get_by_text("acme, owner")).to_be_visible()
    (cookie,) = context.cookies(url)
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    page.goto(f"{url}/console/account")
    expect(page.get_by_role("heading", name="Session")).to_be_visible()
    expect(page.get_by_role("heading", name="Password")).to_have_count(0)
    page.get_by_role("button", name="Sign out", exact=True).click()
    page.wait_for_url(f"{provider}/**")
    assert names_of_cookies(context, url) == set()
    page.get_by_role("button").first.click()
    page.wait_for_url(f"{url}/console/**")
    expect(page.get_by_role("button", name="Sign in with Acme ID")).to_be_visible()
    assert faults == []


def test_a_change_that_needs_confirmation_asks_for_a_new_sign_in(
    context: BrowserContext, oidc_server: ServerUnderTest, provider: str
) -> None:
    page, url = context.new_page(), oidc_server.url
    sign_in(page, url, "ada-1")
    expect(page.get_by_text("acme, owner")).to_be_visible()
    end_confirmations(oidc_server, context)
    page.goto(f"{url}/console/keys")
    create_key(page)
    asked = page.get_by_role("heading", name="Confirm your identity")
    asked.wait_for()
    page.get_by_role("button", name="Sign in with Acme ID").click()
    page.wait_for_url(f"{provider}/**")
    assert "prompt=login" in page.url
    page.get_by_role("button", name="ada-1").click()
    page.wait_for_url(f"{url}/console/keys")
    create_key(page)
    expect(page.locator("[data-secret]")).to_contain_text("lpx_live_")


def test_a_person_without_access_is_told_and_can_choose_another_way(
    context: BrowserContext, oidc_server: ServerUnderTest
) -> None:
    page, url = context.new_page(), oidc_server.url
    sign_in(page, url, "guest-1")
    expect(page.get_by_role("heading", name="You are not signed in")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("none of your groups has access here")
    expect(page.get_by_role("alert")).to_contain_text("identity_not_mapped")
    assert page.url == f"{url}/console/sign-in/callback", "the code is not in the history"
    assert names_of_cookies(context, url) <= {"loraplex_flow"}
    assert grave_violations(page) == []
    page.get_by_role("link", name="Sign in with a password").click()
    expect(page.get_by_label("Password")).to_be_visible()


def test_a_person_who_refuses_at_the_provider_is_not_signed_in(
    context: BrowserContext, oidc_server: ServerUnderTest
) -> None:
    page, url = context.new_page(), oidc_server.url
    page.goto(f"{url}/console/")
    page.get_by_role("button", name="Sign in with Acme ID").click()
    page.get_by_role("button", name="Deny").click()
    expect(page.get_by_role("alert")).to_contain_text("did not sign you in")


def test_a_local_operator_signs_in_while_the_provider_is_away(
    context: BrowserContext,
    tiny_base: Path,
    tmp_path: Path,
) -> None:
    settings = {
        "LORAPLEX_OIDC_ISSUER": f"http://127.0.0.1:{free_port()}",
        "LORAPLEX_OIDC_CLIENT_ID": "console",
        "LORAPLEX_OIDC_NAME": "Acme ID",
    }
    with serving(tiny_base, tmp_path, engine=FAKE_ENGINE, **settings) as server:
        headers = {"authorization": f"Bearer {server.make_operator('root')}"}
        path = f"{server.url}/admin/operators/root/invitation"
        token = httpx.post(path, headers=headers).json()["token"]
        body = {"token": token, "password": PASSWORD}
        httpx.post(f"{server.url}/v1/session/enrolment", json=body).raise_for_status()
        page = context.new_page()
        page.goto(f"{server.url}/console/")
        page.get_by_role("button", name="Sign in with Acme ID").click()
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        page.get_by_label("Name").fill("root")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in", exact=True).click()
        expect(page.get_by_text("operator, admin")).to_be_visible()


@pytest.fixture
def tls_url(
    provider: str,
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """A server with a certificate of its own."""
    make_certificates(tmp_path, "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    settings = {
        **sign_in_settings(provider),
        "LORAPLEX_SSL_CERTFILE": str(tmp_path / "server.pem"),
        "LORAPLEX_SSL_KEYFILE": str(tmp_path / "server.key"),
    }
    with serving(tiny_base, tmp_path / "data", engine=FAKE_ENGINE, **settings) as server:
        yield server.url


@pytest.fixture
def https_url(request: pytest.FixtureRequest) -> str:
    """Of a fixture by its name."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.mark.parametrize("https_url", ["proxy", "tls_url"], indirect=True)
def test_with_tls_the_redirect_and_the_cookies_are_secure(
    context: BrowserContext, https_url: str, provider: str
) -> None:
    page = context.new_page()
    page.goto(f"{https_url}/console/")
    page.get_by_role("button", name="Sign in with Acme ID").click()
    page.wait_for_url(f"{provider}/**")
    sent = httpx.URL(page.url).params
    assert sent["redirect_uri"] == f"{https_url}/console/sign-in/callback"
    page.get_by_role("button", name="root-1").click()
    page.wait_for_url(re.compile(f"{https_url}/console/?$"))
    expect(page.get_by_text("operator, admin")).to_be_visible()
    (cookie,) = context.cookies(https_url)
    assert cookie["name"] == "__Host-loraplex"
    assert cookie["secure"]
