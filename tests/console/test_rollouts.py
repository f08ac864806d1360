"""Rollouts in the console: watched canaries, why one ended, and shadows."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from support.accessibility import COLORS, grave_violations
from support.chromium import PHONE
from support.console import Visitor, visiting
from support.seeded import Seeded

PROD = "/v1/adapters/assistant/aliases/prod"
PAGE = "/adapters/acme/assistant/aliases"
CANARY = {"version": 2, "percent": 10}
SPLIT = {"version": 1, "canary": CANARY}
LIMITS = {"error_rate": 0.01, "refusals": None, "length": 1.5, "latency": 2.0, "min_requests": 50}
NO_JUDGE = {"judge": 0.1, "judge_model": None, "judge_percent": 10.0}


@pytest.fixture
def page(owner: Visitor, seeded: Seeded) -> Iterator[Page]:
    """The aliases of an adapter whose `prod` is split, and is again afterwards."""
    yield owner.page
    seeded.change("PUT", PROD, SPLIT, tenant="acme")


def watch_box(page: Page) -> Locator:
    return page.get_by_role("checkbox", name="End the canary automatically if it is worse")


def limits_of(seeded: Seeded) -> object:
    headers = {"x-loraplex-tenant": "acme"}
    return seeded.admin.get(PROD, headers=headers).json()["canary"]["limits"]


def test_a_canary_is_watched_with_the_default_limits(
    owner: Visitor, page: Page, seeded: Seeded
) -> None:
    owner.open(PAGE)
    expect(watch_box(page)).not_to_be_checked()
    expect(page.get_by_text("2 % more errors", exact=False)).to_be_visible()
    watch_box(page).check()
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("10 % to 2, watched")).to_be_visible()
    expect(watch_box(page)).to_be_checked()
    assert limits_of(seeded) == {
        "error_rate": 0.02,
        "refusals": 0.05,
        "length": 1.5,
        "latency": 1.5,
        "min_requests": 100,
        **NO_JUDGE,
    }


def test_a_judge_is_named_and_kept(owner: Visitor, page: Page, seeded: Seeded) -> None:
    owner.open(PAGE)
    watch_box(page).check()
    page.get_by_role("textbox", name="Judge").fill("assistant@1")
    page.get_by_role("slider").fill("30")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("30 % to 2, watched")).to_be_visible()
    expect(page.get_by_role("textbox", name="Judge")).to_have_value("assistant@1")
    text = "fewer than 40 % of comparisons won, judged by assistant@1"
    expect(page.get_by_text(text, exact=False)).to_be_visible()
    view = limits_of(seeded)
    assert isinstance(view, dict)
    assert (view["judge"], view["judge_model"]) == (0.1, "assistant@1")


def test_a_change_of_the_share_keeps_the_limits(owner: Visitor, page: Page, seeded: Seeded) -> None:
    seeded.change(
        "PUT", PROD, {"version": 1, "canary": {**CANARY, "limits": LIMITS}}, tenant="acme"
    )
    owner.open(PAGE)
    text = "1 % more errors, answers 1.5 times as long or short, 2 times the time per token"
    expect(page.get_by_text(text, exact=False)).to_be_visible()
    page.get_by_role("slider").fill("20")
    page.get_by_role("button", name="Apply").click()
    expect(page.get_by_text("20 % to 2, watched")).to_be_visible()
    assert limits_of(seeded) == {**LIMITS, **NO_JUDGE}


def test_the_history_says_why_a_canary_ended(owner: Visitor, page: Page) -> None:
    reason = "error_rate: 12.00 % in 250 requests of the canary, 1.00 % in 2,250 of the other"
    change = {
        "object": "adapter.alias.change",
        "alias": "prod",
        "action": "rollback",
        "version": 1,
        "canary": None,
        "changed_at": "2026-11-29T12:00:00Z",
        "changed_by": "system",
        "reason": reason,
    }

    def answer(route: Route) -> None:
        body = json.dumps({"object": "list", "data": [change]})
        route.fulfill(body=body, content_type="application/json")

    page.route("**/aliases/prod/history*", answer)
    try:
        owner.open(PAGE)
        expect(page.get_by_text(reason)).to_be_visible()
        expect(page.get_by_text("rollback: version 1 by system")).to_be_visible()
    finally:
        page.unroute("**/aliases/prod/history*")


def test_a_shadow_is_shown_with_its_comparison_and_ended(
    browser: Browser, owner: Visitor, page: Page, seeded: Seeded
) -> None:
    seeded.change("PUT", f"{PROD}/shadow", {"version": 2, "percent": 5}, tenant="acme")
    owner.open(PAGE)
    shadow = page.get_by_role("region", name="Shadow of prod")
    expect(shadow).to_contain_text("version 2 answers copies of 5 % of the requests")
    expect(shadow).to_contain_text("No answers compared yet")
    assert grave_violations(page) == []
    with visiting(browser, owner.url, viewport=PHONE, dark=True) as phone:
        phone.page.context.add_cookies(page.context.cookies())  # type: ignore[arg-type]
        phone.open(PAGE)
        assert phone.overhang() <= 0
        assert grave_violations(phone.page, COLORS) == []
    shadow.get_by_role("button", name="End shadow").click()
    expect(shadow).to_have_count(0)


def test_a_shadow_is_set(owner: Visitor, page: Page) -> None:
    owner.open(PAGE)
    page.get_by_role("button", name="Set a shadow").click()
    dialog = page.get_by_role("dialog", name="Shadow of prod")
    expect(dialog.get_by_label("Version")).to_have_text("Version 2")
    dialog.get_by_label("Percent of the requests").fill("2.5")
    assert grave_violations(page) == []
    dialog.get_by_role("button", name="Set shadow").click()
    shadow = page.get_by_role("region", name="Shadow of prod")
    expect(shadow).to_contain_text("version 2 answers copies of 2.5 % of the requests")
    shadow.get_by_role("button", name="End shadow").click()
    expect(page.get_by_role("button", name="Set a shadow")).to_be_visible()
