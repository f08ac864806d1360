"""The first steps of a new tenant, ticked off while they are taken."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from loraplex.api.demo.manifest import WEIGHTS
from support.accessibility import grave_violations
from support.console import Visitor
from support.seeded import Seeded
from support.server import Caller

TENANT = "beginners"


def steps_done(page: Page) -> list[bool]:
    steps = page.locator(".steps > li")
    return [bool(step) for step in steps.evaluate_all("all => all.map(e => e.className !== '')")]


def test_each_step_is_ticked_when_it_is_done(operator: Visitor, seeded: Seeded) -> None:
    page = operator.page
    tenant = seeded.change("POST", "/admin/tenants", {"slug": TENANT, "name": "Beginners"})
    operator.open("/settings")
    operator.pick(TENANT)
    operator.open("/")
    done = page.locator(".steps > li.is-done")
    expect(page.locator(".steps > li")).to_have_count(3)
    assert steps_done(page) == [False, False, False]
    assert grave_violations(page) == []
    key = {"name": "first", "scopes": ["infer", "adapters:read", "adapters:write"]}
    issued = seeded.change("POST", "/v1/keys", key, tenant=TENANT)
    expect(done).to_have_count(1, timeout=15_000)
    assert steps_done(page) == [True, False, False]

    caller = Caller(seeded.server.url, tenant["id"], TENANT, issued["key"])
    seeded.server.callers.append(caller)
    caller.push(WEIGHTS / "sql", "bot")
    expect(done).to_have_count(2, timeout=15_000)
    assert steps_done(page) == [True, True, False]
    page.get_by_role("link", name="code for bot").click()
    expect(page.get_by_role("region", name="Code, curl")).to_contain_text('"model": "bot"')

    operator.open("/")
    body = {"model": "bot", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    caller.http.post("/v1/chat/completions", json=body).raise_for_status()
    expect(page.get_by_text("First steps")).to_have_count(0, timeout=15_000)


def test_hidden_steps_stay_hidden(operator: Visitor) -> None:
    operator.open("/settings")
    operator.pick("initech")
    operator.open("/")
    operator.page.get_by_role("button", name="Hide").click()
    operator.open("/")
    expect(operator.page.get_by_text("First steps")).to_have_count(0)
