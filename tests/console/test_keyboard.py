"""The main flow by keyboard only: everything is reachable, and the focus is visible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from support.console import PASSWORD, Visitor, confirm_if_asked, invite_operator, visiting
from support.seeded import Seeded

MAX_STEPS = 60
NAME = "by keyboard"


@pytest.fixture(scope="module")
def visitor(browser: Browser, seeded: Seeded) -> Iterator[Visitor]:
    with visiting(browser, seeded.server.url) as one:
        yield one


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element of this name has the focus, which has to be visible."""
    for _ in range(MAX_STEPS):
        page.keyboard.press("Tab")
        if name in _focused(page):
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(outline) != "none", f"{name} does not show its focus"
            return
    raise AssertionError(f"{name} is not reached by Tab")


def _focused(page: Page) -> tuple[str, ...]:
    """What names the focused element: its label, its own text, or that of its labels."""
    return tuple(
        page.evaluate(
            "(one => [one.getAttribute('aria-label'), one.innerText, "
            "...[...(one.labels ?? [])].map(label => label.innerText)]"
            ".filter(Boolean).map(text => text.trim()))(document.activeElement)"
        )
    )


def test_a_key_is_issued_without_a_mouse(visitor: Visitor, seeded: Seeded) -> None:
    page = visitor.page
    page.goto(f"{visitor.url}/console/join#{invite_operator(seeded)}")
    page.get_by_role("heading", name="Set your password").wait_for()
    tab_to(page, "New password")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    tab_to(page, "Tenant")
    page.keyboard.type("acme")
    tab_to(page, "Keys")
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Keys").wait_for()
    tab_to(page, "New key")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.keyboard.type(NAME)
    page.keyboard.press("Enter")
    confirm_if_asked(page)
    page.locator("[data-secret]").wait_for()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_text(NAME)).to_be_visible()


def test_the_navigation_can_be_skipped(visitor: Visitor) -> None:
    visitor.open("/tenants")
    page = visitor.page
    page.keyboard.press("Tab")
    assert _focused(page) == ("Skip to content",)
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
