"""With 2,000 tenants and 5,000 adapters a page loads and holds one page of them only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from support.chromium import PHONE
from support.console import PAGES, Visitor, visiting
from support.many import NUM_ADAPTERS, NUM_OWNERS, NUM_TENANTS, add_many
from support.seeded import Seeded

MAX_ROWS = 500
MAX_REQUESTS = 12
MAX_BYTES = 600_000


@pytest.fixture(scope="module", autouse=True)
def _many(seeded: Seeded) -> None:
    database = seeded.server.database
    add_many(database)
    database.close()


@pytest.mark.parametrize("name", PAGES)
def test_no_page_asks_for_everything_or_is_cut(operator: Visitor, name: str) -> None:
    asked: list[int] = []

    def count(size: object) -> None:
        if size.request.resource_type == "fetch":  # type: ignore[attr-defined]
            asked.append(len(size.body()))  # type: ignore[attr-defined]

    operator.page.on("response", count)
    operator.open(PAGES[name])
    operator.page.remove_listener("response", count)
    assert len(asked) <= MAX_REQUESTS
    assert sum(asked) <= MAX_BYTES
    assert operator.page.locator("main tr").count() <= MAX_ROWS
    assert operator.overhang() <= 0


@pytest.fixture(scope="module")
def phone(browser: Browser, seeded: Seeded, operator: Visitor) -> Iterator[Visitor]:
    """The operator with a phone, who looks at all tenants."""
    with visiting(browser, seeded.server.url, viewport=PHONE) as visitor:
        visitor.page.context.add_cookies(operator.page.context.cookies())  # type: ignore[arg-type]
        yield visitor


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_every_page_of_many_tenants(phone: Visitor, name: str) -> None:
    phone.open(PAGES[name])
    assert phone.overhang() <= 0


def test_adapters_are_found_among_thousands(operator: Visitor, seeded: Seeded) -> None:
    """The last page is reached by narrowing, not by turning a hundred pages."""
    page = operator.page
    operator.pick(f"many-{NUM_OWNERS - 1:04}")
    operator.open("/adapters?search=bot-24")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("bot-24")
    operator.pick(None)
    operator.open("/adapters?search=bot-24")
    assert 1 < rows.count() < NUM_ADAPTERS // 10
    found = seeded.admin.get("/admin/adapters", params={"search": "bot-24", "limit": 500}).json()
    assert len(found["data"]) == NUM_OWNERS


def test_a_tenant_is_picked_among_those_that_no_list_shows(operator: Visitor) -> None:
    operator.pick(None)
    operator.open("/tenants")
    page, slug = operator.page, f"many-{NUM_TENANTS - 1}"
    field = page.get_by_label("Tenant", exact=True)
    with page.expect_response(lambda answer: f"search={slug}" in answer.url) as found:
        field.press_sequentially(slug)
    assert [each["slug"] for each in found.value.json()["data"]] == [slug]
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Show all tenants")).to_be_visible()
    page.get_by_label("Search tenants").fill("many 19")
    expect(page.locator("tbody tr")).to_have_count(100)  # the first page of 111
    page.get_by_label("Search tenants").fill("many 199")
    expect(page.locator("tbody tr")).to_have_count(11)  # 199 and 1990 to 1999


def test_pages_of_a_list_follow_each_other_without_gap_or_repetition(operator: Visitor) -> None:
    page = operator.page
    operator.pick(None)
    operator.open("/tenants")
    seen: list[str] = []
    while True:
        links = page.locator("tbody a")
        seen += links.all_inner_texts()
        following = page.get_by_role("button", name="Next")
        if not following.count() or following.is_disabled():
            break
        following.click()
        expect(links.first).not_to_have_text(seen[-links.count()])
    assert len(seen) == len(set(seen)) >= NUM_TENANTS
    assert seen == sorted(seen)
