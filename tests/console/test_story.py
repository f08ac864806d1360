"""The main tasks of the console in order, from an invitation link to a revoked key."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from loraplex.api.demo.manifest import WEIGHTS
from loraplex.api.demo.task import Style, held_out_requests
from support.console import PASSWORD, Visitor, confirm_if_asked, invite_operator, visiting
from support.seeded import Seeded

TENANT = "umbrella"
BOT = "helper"
REQUEST = held_out_requests(1)[0]


@pytest.fixture(scope="module")
def visitor(browser: Browser, seeded: Seeded) -> Iterator[Visitor]:
    """One person, who goes through all of it."""
    with visiting(browser, seeded.server.url) as one:
        yield one


@pytest.fixture(scope="module")
def page(visitor: Visitor) -> Page:
    return visitor.page


@pytest.fixture(scope="module")
def key(visitor: Visitor, page: Page, seeded: Seeded) -> str:
    """The key of a tenant that was made, by somebody who came with a one-time link."""
    sign_in_by_link(visitor, invite_operator(seeded, _operator(seeded)))
    visitor.go("Tenants")
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Slug").fill(TENANT)
    page.get_by_label("Name", exact=True).fill("Umbrella & Sons")
    page.get_by_role("button", name="Create tenant").click()
    page.get_by_role("heading", level=1, name=TENANT).wait_for()
    page.get_by_role("main").get_by_role("link", name="Keys").click()
    return issue_key(page, "production")


def _operator(seeded: Seeded) -> str:
    name = f"newcomer-{len(seeded.admin.get('/admin/operators').json()['data'])}"
    seeded.change("POST", "/admin/operators", {"name": name, "role": "admin"})
    return name


def sign_in_by_link(visitor: Visitor, token: str) -> None:
    visitor.page.goto(f"{visitor.url}/console/join#{token}")
    visitor.page.get_by_label("New password").fill(PASSWORD)
    visitor.page.get_by_role("button", name="Set password and sign in").click()
    visitor.page.get_by_role("heading", level=1, name="Overview").wait_for()
    assert token not in visitor.page.url


def issue_key(page: Page, name: str) -> str:
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Create key").click()
    confirm_if_asked(page)
    secret = page.locator("[data-secret]").inner_text()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    return secret


def upload(visitor: Visitor, style: Style, *, aliases: str = "") -> None:
    page = visitor.page
    dialog = page.get_by_role("dialog")
    if dialog.get_by_label("Name", exact=True).count():
        dialog.get_by_label("Name", exact=True).fill(BOT)
    folder = WEIGHTS / style
    names = ("adapter_config.json", "adapter_model.safetensors")
    dialog.get_by_label("Files").set_input_files([folder / name for name in names])
    dialog.get_by_label("Aliases (optional)").fill(aliases)
    dialog.get_by_role("button", name="Upload").click()
    dialog.wait_for(state="hidden")
    page.get_by_role("heading", level=1, name=BOT).wait_for()


def ask(visitor: Visitor, model: str) -> str:
    """What the playground shows of the answer, with how it was served."""
    visitor.go("Playground")
    page = visitor.page
    page.get_by_label("Model", exact=True).fill(model)
    page.get_by_label("Prompt", exact=True).fill(REQUEST.prompt)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="trace").wait_for()
    visitor.settle()
    return page.locator(".turns").inner_text()


def call(seeded: Seeded, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{seeded.server.url}/v1/models", headers=headers)


def test_a_link_lets_in_once(key: str, visitor: Visitor, browser: Browser) -> None:
    """`key` has used the link; the session's cookie is out of reach of scripts."""
    cookies = visitor.page.context.cookies()
    assert [(cookie["httpOnly"], cookie["sameSite"]) for cookie in cookies] == [(True, "Strict")]
    assert visitor.page.evaluate("document.cookie") == ""


def test_the_new_key_is_shown_once_and_works(key: str, page: Page, seeded: Seeded) -> None:
    assert call(seeded, key).status_code == 200
    page.reload()
    page.get_by_text("production").wait_for()
    assert key not in page.content()


def test_an_uploaded_adapter_becomes_ready_before_ones_eyes(key: str, visitor: Visitor) -> None:
    visitor.go("Adapters")
    visitor.page.get_by_role("button", name="Upload").click()
    upload(visitor, Style.SQL, aliases="prod")
    expect(visitor.page.get_by_text("ready", exact=True).first).to_be_visible(timeout=30_000)


def test_the_playground_answers_with_the_adapter(key: str, visitor: Visitor) -> None:
    shown = ask(visitor, BOT)
    assert REQUEST.answer(Style.SQL) in shown
    assert f"{TENANT}/{BOT}@1" in shown
    assert "tokens/s" in shown


def test_a_moved_alias_means_the_other_version(key: str, visitor: Visitor) -> None:
    page = visitor.page
    visitor.open(f"/adapters/{TENANT}/{BOT}")
    page.get_by_role("button", name="Upload a version").click()
    upload(visitor, Style.JSON)
    visitor.open(f"/adapters/{TENANT}/{BOT}/aliases")
    means = page.get_by_label("Version").first
    expect(means.locator("option")).to_have_count(2, timeout=30_000)
    means.select_option("2")
    page.get_by_role("button", name="Apply").click()
    page.get_by_text("prod means version 2").wait_for()
    shown = ask(visitor, f"{BOT}@prod")
    assert REQUEST.answer(Style.JSON) in shown
    assert f"{TENANT}/{BOT}@2" in shown


def test_usage_and_audit_say_what_was_done(key: str, visitor: Visitor) -> None:
    visitor.go("Usage")
    table = visitor.page.get_by_role("table")
    expect(table.get_by_role("cell", name=BOT).first).to_be_visible()
    visitor.go("Audit log")
    for action in ("key.create", "version.create", "alias.set"):
        expect(visitor.page.get_by_text(action, exact=True).first).to_be_visible()
    visitor.page.get_by_role("button", name="Verify the chain").click()
    expect(visitor.page.get_by_text("intact:")).to_be_visible()


def test_a_revoked_key_is_refused(key: str, visitor: Visitor, seeded: Seeded) -> None:
    visitor.go("Keys")
    visitor.page.get_by_role("button", name="Revoke production").click()
    visitor.page.get_by_role("button", name="Revoke key").click()
    visitor.page.get_by_text("revoked", exact=True).wait_for()
    refused = call(seeded, key)
    assert refused.status_code == 401


def test_several_keys_are_revoked_at_once(visitor: Visitor, seeded: Seeded) -> None:
    issued = [
        seeded.change("POST", "/v1/keys", {"name": name, "scopes": ["infer"]}, tenant=TENANT)["key"]
        for name in ("first", "second")
    ]
    visitor.open("/keys")
    page = visitor.page
    expect(page.get_by_label("Select production")).to_be_disabled()
    page.get_by_label("Select all rows of this page").check()
    page.get_by_role("group", name="Selected rows").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("dialog")).to_contain_text("first")
    page.get_by_role("dialog").get_by_role("button", name="Revoke 2 keys").click()
    expect(page.get_by_text("revoked", exact=True)).to_have_count(3)
    assert [call(seeded, key).status_code for key in issued] == [401, 401]


def test_signed_out_there_is_nothing_to_see(key: str, visitor: Visitor) -> None:
    visitor.page.get_by_role("button", name="Sign out").click()
    visitor.page.get_by_role("heading", name="Sign in").wait_for()
    visitor.open("/tenants")
    visitor.page.get_by_role("heading", name="Sign in").wait_for()
    assert TENANT not in visitor.page.content()
    assert visitor.executed() == []
