"""Typical problems of new users of the console."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, Request, expect

from loraplex.api.demo.manifest import WEIGHTS
from support.console import PASSWORD, Visitor, confirm_if_asked
from support.seeded import Seeded

TENANT = "initech"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def page(operator: Visitor) -> Page:
    operator.open("/settings")
    operator.pick(TENANT)
    return operator.page


def test_who_is_added_gets_a_link_at_once(operator: Visitor, page: Page) -> None:
    operator.open("/users")
    page.get_by_role("button", name="Add user").click()
    page.get_by_label("E-mail address").fill("new@initech.example")
    page.get_by_role("button", name="Add and create link").click()
    confirm_if_asked(page)
    expect(page.locator("[data-secret]")).to_contain_text("/console/join#lpx_join_")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(page.get_by_role("cell", name="new@initech.example", exact=True)).to_be_visible()


def test_a_role_that_somebody_else_has_changed_is_not_changed_unseen(
    operator: Visitor, page: Page, seeded: Seeded
) -> None:
    operator.open("/users")
    page.get_by_role("button", name="Role ben@initech.example").click()
    users = seeded.admin.get("/v1/users", headers={"x-loraplex-tenant": TENANT}).json()["data"]
    (ben,) = [user for user in users if user["email"] == "ben@initech.example"]
    seeded.change("PATCH", f"/v1/users/{ben['id']}", {"role": "viewer"}, tenant=TENANT)
    page.get_by_role("dialog").get_by_label("Role").select_option("owner")
    page.get_by_role("button", name="Change role").click()
    expect(page.get_by_role("alert")).to_contain_text("etag_mismatch")
    answer = seeded.admin.get(f"/v1/users/{ben['id']}", headers={"x-loraplex-tenant": TENANT})
    assert answer.json()["role"] == "viewer"


def test_an_archive_is_refused_with_the_way_out(
    operator: Visitor, page: Page, tmp_path: Path
) -> None:
    archive = tmp_path / "bot.zip"
    archive.write_bytes(b"PK")
    operator.open("/adapters")
    page.get_by_role("button", name="Upload").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("bot")
    dialog.get_by_label("Files").set_input_files(archive)
    expect(dialog).to_contain_text("unpack it")
    dialog.get_by_role("button", name="Upload").click()
    expect(dialog).to_contain_text("unpack it")


def test_a_folder_is_taken_without_its_checkpoints_and_deleted_offers_nothing_more(
    operator: Visitor, page: Page, tmp_path: Path
) -> None:
    folder = tmp_path / "bot"
    for inner in (folder, folder / "checkpoint-1"):
        inner.mkdir()
        for name in (CONFIG, TENSORS):
            (inner / name).write_bytes((WEIGHTS / "sql" / name).read_bytes())
    operator.open("/adapters")
    page.get_by_role("button", name="Upload").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("short-lived")
    dialog.get_by_label("Aliases (optional)").fill("prod")
    dialog.get_by_label("Or a folder").set_input_files(folder)
    dialog.get_by_role("button", name="Upload").click()
    expect(page.get_by_text("prod → 1")).to_be_visible(timeout=30_000)

    page.get_by_role("button", name="Delete", exact=True).click()
    dialog.get_by_label("Type short-lived to continue").fill("short-lived")
    dialog.get_by_role("button", name="Delete permanently").click()
    done = dialog.get_by_role("button", name="Done")
    asked = page.get_by_role("heading", name="Confirm your identity")
    done.or_(asked).first.wait_for()
    if asked.is_visible():
        page.keyboard.type(PASSWORD)
        page.keyboard.press("Enter")
    done.click()
    expect(page.get_by_role("heading", name="1 version deleted")).to_be_visible()
    expect(page.get_by_text("prod → 1")).to_have_count(0)
    expect(page.get_by_role("button", name="Delete", exact=True)).to_have_count(0)


def test_a_request_that_is_not_in_the_log_yet_is_no_error(operator: Visitor, page: Page) -> None:
    operator.open("/requests/req-000000000000000000000000")
    expect(page.get_by_text("A running request appears here")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_an_open_page_finds_a_server_that_is_back(operator: Visitor, page: Page) -> None:
    page.route("**/admin/usage**", lambda route: route.abort())
    operator.go("Usage")
    expect(page.get_by_role("alert").first).to_contain_text("The server does not respond")
    page.unroute("**/admin/usage**")
    expect(page.get_by_role("alert")).to_have_count(0, timeout=15_000)


def test_what_pages_ask_by_themselves_says_how_long_nobody_did_anything(
    operator: Visitor, page: Page
) -> None:
    page.context.clock.install()
    operator.open("/memory")
    page.keyboard.press("Shift")
    page.context.clock.fast_forward(600_000)
    with page.expect_request(lambda request: _idle_seconds(request) >= 600):
        page.context.clock.fast_forward(3_000)
    page.keyboard.press("Shift")
    with page.expect_request(lambda request: 0 <= _idle_seconds(request) < 600):
        page.context.clock.fast_forward(3_000)


def _idle_seconds(request: Request) -> int:
    """The seconds that `request` names, -1 where it names none."""
    return int(request.headers.get("x-loraplex-idle-seconds", -1))
