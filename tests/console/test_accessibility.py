"""Every page is accessible: light, dark, narrow, and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from support.accessibility import COLORS, STANDARDS, grave_violations
from support.chromium import PHONE
from support.console import PAGES, Visitor, visiting
from support.seeded import Seeded


@pytest.fixture(scope="module", params=[False, True], ids=["light", "dark"])
def reader(
    request: pytest.FixtureRequest, browser: Browser, seeded: Seeded, operator: Visitor
) -> Iterator[tuple[Visitor, list[str]]]:
    """The operator's session in one of the two appearances, and the rules that matter there."""
    cookies = operator.page.context.cookies()
    with visiting(browser, seeded.server.url, dark=request.param) as visitor:
        visitor.page.context.add_cookies(cookies)  # type: ignore[arg-type]
        visitor.open("/")
        visitor.pick("acme")
        yield visitor, COLORS if request.param else STANDARDS


@pytest.mark.parametrize("name", PAGES)
def test_no_page_breaks_a_rule_gravely(reader: tuple[Visitor, list[str]], name: str) -> None:
    visitor, rules = reader
    visitor.open(PAGES[name])
    assert grave_violations(visitor.page, rules) == []


@pytest.mark.parametrize("dark", [False, True])
def test_nobody_is_shut_out_of_signing_in(browser: Browser, seeded: Seeded, dark: bool) -> None:
    with visiting(browser, seeded.server.url, dark=dark) as visitor:
        for route in ("/sign-in", "/join#token"):
            visitor.open(route)
            assert grave_violations(visitor.page) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_every_page_without_scrolling_sideways(phone: Visitor, name: str) -> None:
    phone.open(PAGES[name])
    assert phone.overhang() <= 0


@pytest.fixture(scope="module")
def phone(browser: Browser, seeded: Seeded, operator: Visitor) -> Iterator[Visitor]:
    cookies = operator.page.context.cookies()
    with visiting(browser, seeded.server.url, viewport=PHONE) as visitor:
        visitor.page.context.add_cookies(cookies)  # type: ignore[arg-type]
        visitor.open("/")
        visitor.pick("acme")
        yield visitor
