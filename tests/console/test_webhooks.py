"""The webhooks of a tenant in the console: from the first one to its deliveries and its end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from support.accessibility import COLORS, grave_violations
from support.chromium import PHONE
from support.console import Visitor, confirm_if_asked, enrol, invite_user, visiting
from support.seeded import WEBHOOK_HOST, Seeded

TENANT = "initech"
NO_ANSWER = re.compile("name not resolved|timeout|connection failed")
"""What an attempt says where the host's name does not exist, or no network is there to ask."""
URL = f"https://{WEBHOOK_HOST}/loraplex?token=abc"


@pytest.fixture(scope="module")
def owner(browser: Browser, seeded: Seeded) -> Iterator[Visitor]:
    """The owner of a tenant without webhooks."""
    with visiting(browser, seeded.server.url) as visitor:
        enrol(
            visitor.page.context,
            visitor.url,
            invite_user(seeded, TENANT, f"owner@{TENANT}.example"),
        )
        yield visitor


@pytest.fixture(scope="module")
def page(owner: Visitor) -> Page:
    return owner.page


@pytest.fixture(scope="module")
def secret(owner: Visitor, page: Page) -> str:
    """Of a webhook that the owner has made."""
    owner.open("/webhooks")
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("URL").fill(URL)
    page.get_by_label("Description").fill("On call")
    page.get_by_label("All events, including future types").uncheck()
    for event in ("version.ready", "budget.alert"):
        page.get_by_role("checkbox", name=event).check()
    page.get_by_role("button", name="Create webhook").click()
    return shown_secret(page)


def shown_secret(page: Page) -> str:
    confirm_if_asked(page)
    shown = page.locator("[data-secret]").inner_text()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    return shown


def open_webhook(owner: Visitor) -> None:
    owner.open("/webhooks")
    owner.page.get_by_role("link", name=WEBHOOK_HOST).click()
    owner.page.get_by_role("heading", level=1, name=WEBHOOK_HOST).wait_for()
    owner.settle()


def test_a_host_that_the_operator_does_not_list_is_refused_in_the_form(
    owner: Visitor, page: Page
) -> None:
    owner.open("/webhooks")
    page.get_by_role("button", name="New webhook").click()
    for url, code in (
        ("https://elsewhere.example/", "webhook_host_not_allowed"),
        ("https://127.0.0.1/", "webhook_url_invalid"),
    ):
        page.get_by_label("URL").fill(url)
        page.get_by_role("button", name="Create webhook").click()
        confirm_if_shown(page)
        expect(page.get_by_role("alert")).to_contain_text(code)
        expect(page.get_by_label("URL")).to_have_value(url)


def confirm_if_shown(page: Page) -> None:
    """Type the password if it is asked for; the error comes afterwards."""
    asked = page.get_by_role("heading", name="Confirm your identity")
    asked.or_(page.get_by_role("alert")).first.wait_for()
    if asked.is_visible():
        confirm_if_asked(page)


def test_the_secret_of_a_new_webhook_is_shown_once(owner: Visitor, page: Page, secret: str) -> None:
    assert secret.startswith("whsec_")
    owner.open("/webhooks")
    row = page.get_by_role("row").filter(has_text=WEBHOOK_HOST)
    for text in ("On call", "active", "budget.alert, version.ready"):
        expect(row).to_contain_text(text)
    open_webhook(owner)
    expect(page.get_by_text(URL, exact=True)).to_be_visible()
    assert secret not in page.content()


def test_a_delivery_that_fails_says_why(owner: Visitor, page: Page, secret: str) -> None:
    open_webhook(owner)
    page.get_by_role("button", name="Send test event").click()
    delivery = page.get_by_role("table", name="Deliveries").get_by_role("row").nth(1)
    expect(delivery).to_contain_text("webhook.test")
    reason = delivery.locator("[data-label='Last failure']")
    expect(reason).to_contain_text(NO_ANSWER, timeout=30_000)
    page.get_by_label("State", exact=True).select_option("delivered")
    expect(page.get_by_role("heading", name="No deliveries")).to_be_visible()
    page.get_by_label("State", exact=True).select_option("pending")
    expect(delivery).to_contain_text("webhook.test")


def test_a_webhook_is_changed_without_naming_its_url_again(
    owner: Visitor, page: Page, secret: str
) -> None:
    open_webhook(owner)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("All events, including future types").check()
    with page.expect_request(lambda request: request.method == "PATCH") as sent:
        page.get_by_role("button", name="Save").click()
    assert sent.value.post_data_json == {"description": "On call", "events": None}
    expect(page.get_by_text("all, including future types")).to_be_visible()


def test_a_new_secret_overlaps_with_the_old_one(owner: Visitor, page: Page, secret: str) -> None:
    open_webhook(owner)
    page.get_by_role("button", name="Rotate secret").click()
    page.get_by_role("button", name="Create new secret").click()
    assert shown_secret(page) != secret
    expect(page.get_by_text("Old secret signs until")).to_be_visible()


def test_the_page_of_a_webhook_fits_a_phone_and_breaks_no_rule(
    browser: Browser, seeded: Seeded, owner: Visitor, page: Page, secret: str
) -> None:
    open_webhook(owner)
    place = page.url.partition("/console")[2]
    assert grave_violations(page) == []
    with visiting(browser, seeded.server.url, viewport=PHONE, dark=True) as phone:
        phone.page.context.add_cookies(page.context.cookies())  # type: ignore[arg-type]
        phone.open(place)
        assert phone.overhang() <= 0
        assert grave_violations(phone.page, COLORS) == []


def test_a_webhook_is_disabled_enabled_and_deleted(
    owner: Visitor, page: Page, secret: str, seeded: Seeded
) -> None:
    open_webhook(owner)
    page.get_by_role("button", name="Disable").click()
    page.get_by_role("dialog").get_by_role("button", name="Disable").click()
    state = page.locator(".facts .badge")
    expect(state).to_have_text("disabled")
    expect(page.get_by_role("button", name="Send test event")).to_have_count(0)
    page.get_by_role("button", name="Enable").click()
    expect(state).to_have_text("active")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete webhook").click()
    expect(page.get_by_role("heading", name="No webhooks")).to_be_visible()
    headers = {"x-loraplex-tenant": TENANT}
    assert seeded.admin.get("/v1/webhooks", headers=headers).json()["data"] == []
