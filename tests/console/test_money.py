"""Prices and budgets in the console: set, shown exactly, ended and removed."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from support.console import Visitor
from support.seeded import Seeded

TENANT = "globex"
BASE = "another-base"
"""Not the one that is served, so that no other test is charged by its prices."""


@pytest.fixture
def page(operator: Visitor) -> Page:
    operator.open("/settings")
    operator.pick(TENANT)
    return operator.page


def row_of(page: Page, table: str, text: str) -> Locator:
    return page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)


def fill_prices(page: Page, **amounts: str) -> None:
    dialog = page.get_by_role("dialog")
    for label, amount in amounts.items():
        dialog.get_by_label(label.replace("_", " "), exact=True).fill(amount)
    dialog.get_by_role("button", name="Set prices").click()


def test_prices_are_set_for_all_tenants_and_for_one_and_end(
    operator: Visitor, page: Page, seeded: Seeded
) -> None:
    operator.pick(None)
    operator.open("/prices")
    page.get_by_role("button", name="Set prices").click()
    amounts = {"Base": BASE, "Prompt_tokens": "0.1", "Generated_tokens": "0.000000001"}
    fill_prices(page, **amounts, Tenant="")
    common = row_of(page, "Prices of all tenants", BASE)
    expect(common).to_contain_text("scheduled")
    for amount in ("0.10", "0.000000001"):
        expect(common.get_by_role("cell", name=amount, exact=True).first).to_be_visible()
    page.get_by_role("button", name="Set prices").click()
    fill_prices(page, **{**amounts, "Prompt_tokens": "0.05"}, Tenant=TENANT)
    own = row_of(page, "Prices of single tenants", BASE)
    expect(own).to_contain_text(TENANT)
    own.get_by_role("button", name=f"End the price of {BASE} for {TENANT}").click()
    page.get_by_role("dialog").get_by_label("From").fill("2040-01-02T03:04:05")
    page.get_by_role("button", name="End price").click()
    expect(own).to_contain_text("2040-01-02 03:04:05")
    query = {"tenant": TENANT, "base": BASE}
    (price,) = seeded.admin.get("/admin/prices", params=query).json()["data"]
    assert (price["prompt_tokens"], price["completion_tokens"]) == ("0.05", "0.000000001")
    assert price["effective_until"] == "2040-01-02T03:04:05Z"


def test_a_price_that_is_refused_says_which_amount_is_wrong(operator: Visitor, page: Page) -> None:
    operator.open("/prices")
    page.get_by_role("button", name="Set prices").click()
    expect(page.get_by_label("Tenant", exact=True).last).to_have_value(TENANT)
    fill_prices(page, Prompt_tokens="0,15", Generated_tokens="1")
    expect(page.get_by_role("alert")).to_contain_text("field prompt_tokens")
    expect(page.get_by_label("Prompt tokens", exact=True)).to_have_value("0,15")


def test_only_operators_see_prices(owner: Visitor) -> None:
    owner.open("/")
    places = owner.page.get_by_role("navigation", name="Pages")
    expect(places.get_by_role("link", name="Webhooks")).to_be_visible()
    expect(places.get_by_role("link", name="Prices")).to_have_count(0)


def test_a_budget_of_a_key_is_set_changed_and_removed(
    operator: Visitor, page: Page, seeded: Seeded
) -> None:
    operator.open("/keys")
    keys = page.get_by_role("table", name="Keys")
    expect(keys.get_by_role("meter")).to_have_count(0)
    for amount, shown in (("12.5", "12.50"), ("30", "30.00")):
        set_budget(page, "production", "A month, in UTC", amount)
        expect(keys).to_contain_text(f" of {shown} EUR a month")
        expect(keys.get_by_role("meter")).to_have_attribute("aria-valuemax", amount)
    set_budget(page, "production", "A day, in UTC", "5")
    expect(keys.get_by_role("meter")).to_have_count(2)
    set_budget(page, "production", "A month, in UTC", "")
    expect(keys.get_by_role("meter")).to_have_count(1)
    budgets = seeded.admin.get("/v1/budgets", headers={"x-loraplex-tenant": TENANT}).json()["data"]
    assert [(each["holder"], each["period"], each["amount"]) for each in budgets] == [
        ("key", "day", "5.00")
    ]
    set_budget(page, "production", "A day, in UTC", "")
    expect(keys.get_by_role("columnheader", name="Budget")).to_have_count(0)


def test_budgets_of_a_user_and_of_the_tenant_are_set(operator: Visitor, page: Page) -> None:
    operator.open("/users")
    set_budget(page, "ben@globex.example", "A month, in UTC", "40")
    expect(page.get_by_role("table", name="Users")).to_contain_text("0.00 of 40.00 EUR a month")
    operator.open(f"/tenants/{TENANT}")
    table = page.locator(".table-wrap[aria-label=Budgets]")
    expect(table).to_contain_text("user ben@globex.example, per month")
    operator.open("/users")
    set_budget(page, "ben@globex.example", "A month, in UTC", "")
    operator.open(f"/tenants/{TENANT}")
    page.get_by_role("button", name="Change budgets").click()
    fill_budget(page, "A day, in UTC", "7")
    expect(table).to_contain_text("tenant, per day")
    page.get_by_role("button", name="Change budgets").click()
    fill_budget(page, "A day, in UTC", "")
    expect(table).to_have_count(0)


def test_a_budget_that_is_no_amount_is_refused(operator: Visitor, page: Page) -> None:
    operator.open("/keys")
    page.get_by_role("button", name="Budgets of production").click()
    page.get_by_label("A month, in UTC").fill("ten")
    page.get_by_role("button", name="Save budgets").click()
    expect(page.get_by_role("alert")).to_contain_text("field amount")


def set_budget(page: Page, name: str, label: str, amount: str) -> None:
    page.get_by_role("button", name=f"Budgets of {name}").click()
    fill_budget(page, label, amount)


def fill_budget(page: Page, label: str, amount: str) -> None:
    page.get_by_role("dialog").get_by_label(label).fill(amount)
    page.get_by_role("button", name="Save budgets").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize("cost", ["0.00", "0.75"])
def test_costs_and_margins_are_shown_only_where_there_are_rates(
    operator: Visitor, page: Page, cost: str
) -> None:
    def answer(route: Route) -> None:
        sums: dict[str, Any] = route.fetch().json()
        for each in sums["data"]:
            each.update(cost=cost, amount="0.50", margin="-0.25", currency="EUR")
        route.fulfill(json=sums)

    page.route("**/admin/usage?*", answer)
    operator.open("/usage")
    expect(page.get_by_role("columnheader", name="Steps")).to_have_count(1)
    for name in ("Cost", "Margin"):
        header = page.get_by_role("columnheader", name=name, exact=True)
        expect(header).to_have_count(0 if cost == "0.00" else 1)
    if cost != "0.00":
        expect(page.get_by_role("cell", name="-0.25 EUR").first).to_be_visible()
    page.unroute("**/admin/usage?*")


@pytest.mark.parametrize("currency", [None, "EUR"])
def test_what_was_charged_is_shown_only_where_there_are_prices(
    operator: Visitor, page: Page, currency: str | None
) -> None:
    def answer(route: Route) -> None:
        sums: dict[str, Any] = route.fetch().json()
        for each in sums["data"]:
            each["currency"] = currency
        route.fulfill(json=sums)

    page.route("**/admin/usage?*", answer)
    operator.open("/usage")
    charged = page.get_by_role("columnheader", name="Charged")
    expect(charged).to_have_count(0 if currency is None else 1)
    page.unroute("**/admin/usage?*")
