"""The settings page: values in units, where they come from, and how they are found."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from support.console import Visitor
from support.seeded import Seeded


@pytest.fixture
def page(operator: Visitor) -> Page:
    operator.open("/settings")
    return operator.page


def test_every_setting_is_shown_with_its_source(page: Page, seeded: Seeded) -> None:
    settings = seeded.admin.get("/admin/settings").json()["data"]
    rows = page.locator(".settings > div")
    expect(rows).to_have_count(len(settings))
    shown = dict(
        rows.evaluate_all(
            "all => all.map(e => [e.querySelector('code').textContent,"
            " e.querySelector('.badge').textContent])"
        )
    )
    words = {"environment": "variable"}
    assert shown == {
        one["flag"] or one["variable"] or one["name"]: words.get(one["source"], one["source"])
        for one in settings
    }


def test_values_have_the_units_of_people(page: Page, seeded: Seeded) -> None:
    settings = {one["name"]: one for one in seeded.admin.get("/admin/settings").json()["data"]}
    memory = int(settings["engine.memory_bytes"]["value"])
    row = page.locator(".settings > div").filter(has=page.get_by_text("--memory-gib", exact=True))
    expect(row).to_contain_text(f"{memory >> 20} MiB")
    for flag, value in {
        "--disk-cache-bytes": "10.0 GiB",
        "--stale-seconds": "5 min",
        "--request-log-days": "30 days",
        "--tenant-cap": "60 %",
        "--attention-window": "all",
        "--require-confinement": "off",
    }.items():
        found = page.locator(".settings > div").filter(has=page.get_by_text(flag, exact=True))
        expect(found.locator(".setting-value")).to_have_text(value)


def test_settings_are_found_by_flag_meaning_and_source(page: Page) -> None:
    rows = page.locator(".settings > div")
    search = page.get_by_role("searchbox", name="Search settings")
    search.fill("--kv-dtype")
    expect(rows).to_have_count(1)
    expect(page.get_by_role("heading", level=2)).to_contain_text(["Memory and KV cache"])
    search.fill("Retention of the request log")
    expect(rows).to_have_count(1)
    search.fill("no such setting")
    expect(page.get_by_text("No settings match")).to_be_visible()
    search.fill("")
    page.get_by_label("Source").select_option("file")
    expect(rows.first).to_contain_text("LORAPLEX_SECRET")
    expect(rows.first).to_contain_text("/secret")
