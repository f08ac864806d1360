"""Names: what aliases mean, and all of those that share one content."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from support.console import Visitor
from support.seeded import Seeded


@pytest.fixture
def page(operator: Visitor) -> Page:
    operator.open("/settings")
    operator.pick("acme")
    return operator.page


def test_the_list_shows_what_an_alias_means_and_its_canary(operator: Visitor, page: Page) -> None:
    operator.open("/adapters")
    for name, target in (("assistant", "prod → 1, 10 % → 2"), ("sql", "prod → 1")):
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
        expect(row.get_by_text(target, exact=True)).to_be_visible()


def extents(page: Page) -> Locator:
    return page.get_by_role("region", name="Extents of the arena").get_by_role("row")


def test_a_shared_content_is_shown_under_each_name(
    operator: Visitor, page: Page, seeded: Seeded
) -> None:
    """The seeded tenant has pushed the same weights as two adapters."""
    operator.open("/memory")
    for names in (("sql@1", "assistant@1"), ("json@1", "assistant@2")):
        row = extents(page)
        for name in names:
            row = row.filter(has=page.get_by_role("link", name=f"acme/{name}", exact=True))
        expect(row).to_have_count(1)


def test_a_composition_is_shown_as_one_and_not_as_each_of_its_adapters(
    operator: Visitor, page: Page, seeded: Seeded
) -> None:
    question = {"model": "sql+json:0.5", "prompt": "Ahoy", "max_tokens": 1}
    headers = {"x-loraplex-tenant": "acme"}
    seeded.admin.post("/v1/completions", json=question, headers=headers).raise_for_status()
    operator.open("/memory")
    composed = extents(page).filter(has_text=re.compile(r"acme/(assistant|sql|json)@\d.*\+.*:0\.5"))
    expect(composed).to_have_count(1)
    expect(composed.get_by_role("link")).to_have_count(0)
