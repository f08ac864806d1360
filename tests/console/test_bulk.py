"""Several adapters deleted, several tenants suspended and resumed at once."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from loraplex.api.demo.manifest import WEIGHTS
from support.console import PASSWORD, Visitor
from support.seeded import Seeded

TENANT = "bulk-owner"
BOTS = ("first", "second", "third")
SLUGS = ("bulk-a", "bulk-b", "bulk-c")


@pytest.fixture(scope="module", autouse=True)
def _made(seeded: Seeded) -> None:
    caller = seeded.server.make_caller(TENANT)
    for name in BOTS:
        caller.push(WEIGHTS / "sql", name)
    for slug in SLUGS:
        seeded.change("POST", "/admin/tenants", {"slug": slug})


def select(page: Page, *names: str) -> None:
    for name in names:
        page.get_by_role("checkbox", name=f"Select {name}", exact=True).check()


def confirm(page: Page, action: str) -> None:
    """Do it, with the password if it is asked for."""
    page.get_by_role("dialog").get_by_role("button", name=action, exact=True).click()
    asked = page.get_by_role("heading", name="Confirm your identity")
    gone = page.locator("body:not(:has(dialog[open]))")
    asked.or_(gone).first.wait_for()
    if asked.is_visible():
        page.keyboard.type(PASSWORD)
        page.keyboard.press("Enter")
    gone.wait_for()


def test_selected_adapters_are_deleted_once_their_number_is_typed(
    operator: Visitor, seeded: Seeded
) -> None:
    page = operator.page
    operator.open("/settings")
    operator.pick(TENANT)
    operator.open("/adapters")
    select(page, f"{TENANT}/first", f"{TENANT}/third")
    page.get_by_role("group", name="Selected rows").get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    listed = dialog.get_by_role("list", name="Names").get_by_role("listitem")
    assert sorted(listed.all_inner_texts()) == [f"{TENANT}/first", f"{TENANT}/third"]
    action = dialog.get_by_role("button", name="Delete 2 adapters permanently")
    expect(action).to_be_disabled()
    dialog.get_by_label("Type 2 adapters to continue").fill("2 adapters")
    dialog.get_by_label("Drain time").fill("0")
    confirm(page, "Delete 2 adapters permanently")
    rows = page.get_by_role("table", name="Adapters").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("second")
    left = seeded.admin.get("/v1/adapters", headers={"x-loraplex-tenant": TENANT}).json()["data"]
    assert [adapter["name"] for adapter in left] == ["second"]


def test_selected_tenants_are_suspended_and_resumed(operator: Visitor, seeded: Seeded) -> None:
    page = operator.page
    seeded.change("PATCH", "/admin/tenants/bulk-c", {"suspended": True})
    operator.open("/tenants?search=bulk-")
    select(page, *SLUGS)
    chosen = page.get_by_role("group", name="Selected rows")
    chosen.get_by_role("button", name="Suspend").click()
    dialog = page.get_by_role("dialog")
    listed = dialog.get_by_role("list", name="Names").get_by_role("listitem")
    assert listed.all_inner_texts() == ["bulk-a", "bulk-b"], "the third is suspended already"
    dialog.get_by_label("Type 2 tenants to continue").fill("2 tenants")
    confirm(page, "Suspend 2 tenants")
    expect(page.get_by_role("cell", name="suspended", exact=True)).to_have_count(3)
    select(page, *SLUGS)
    expect(chosen.get_by_role("button", name="Suspend")).to_have_count(0)
    chosen.get_by_role("button", name="Resume").click()
    confirm(page, "Resume 3 tenants")
    expect(page.get_by_role("cell", name="suspended", exact=True)).to_have_count(0)


def test_only_who_may_change_something_selects_rows(owner: Visitor, operator: Visitor) -> None:
    owner.open("/adapters")
    expect(owner.page.get_by_role("checkbox", name="Select acme/sql")).to_be_visible()
    operator.open("/requests")
    expect(operator.page.get_by_role("checkbox")).to_have_count(0)
