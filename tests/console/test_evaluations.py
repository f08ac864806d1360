"""Golden sets, evaluations and gates in the console."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from loraplex.api.demo.manifest import WEIGHTS
from support.accessibility import COLORS, grave_violations
from support.chromium import PHONE
from support.console import Visitor, enrol, invite_user, visiting
from support.evaluations import ended, expecting, put_set
from support.seeded import Seeded
from support.server import Caller

TENANT = "judges"
SCOPES = ["infer", "adapters:read", "adapters:write"]
PROMPTS = ["one", "two two", "three"]
EVALUATION_MS = 300_000


@pytest.fixture(scope="module")
def caller(seeded: Seeded) -> Caller:
    """The key of a tenant with `bot@1`, the version of `prod`, and `bot@2`."""
    tenant = seeded.change("POST", "/admin/tenants", {"slug": TENANT})
    for role in ("owner", "viewer"):
        user = {"email": f"{role}@{TENANT}.example", "role": role}
        seeded.change("POST", "/v1/users", user, tenant=TENANT)
    issued = seeded.change("POST", "/v1/keys", {"name": "ci", "scopes": SCOPES}, tenant=TENANT)
    caller = Caller(seeded.server.url, tenant["id"], TENANT, issued["key"])
    seeded.server.callers.append(caller)
    caller.push(WEIGHTS / "sql", "bot", aliases=["prod"])
    caller.push(WEIGHTS / "json", "bot")
    return caller


@pytest.fixture(scope="module")
def owner(browser: Browser, seeded: Seeded, caller: Caller) -> Iterator[Visitor]:
    with visiting(browser, seeded.server.url) as visitor:
        token = invite_user(seeded, TENANT, f"owner@{TENANT}.example")
        enrol(visitor.page.context, visitor.url, token)
        yield visitor


@pytest.fixture(scope="module")
def page(owner: Visitor) -> Page:
    return owner.page


@pytest.fixture(scope="module")
def evaluated(owner: Visitor, page: Page, caller: Caller) -> str:
    """The address of an evaluation with a regression that was started in the form."""
    put_set(caller, expecting(caller, "bot@1", PROMPTS))
    owner.open(f"/adapters/{TENANT}/bot/evaluations")
    page.get_by_role("button", name="Evaluate a version").click()
    page.get_by_role("dialog").get_by_label("Version", exact=True).select_option("2")
    assert grave_violations(page) == []
    page.get_by_role("button", name="Evaluate", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Version 2 against version 1")
    expect(page.get_by_role("heading", name="Report")).to_be_visible(timeout=EVALUATION_MS)
    owner.settle()
    return page.url.partition("/console")[2]


def test_the_report_shows_slices_and_cases_side_by_side(
    owner: Visitor, page: Page, caller: Caller, evaluated: str
) -> None:
    report = ended(caller, evaluated.rpartition("/")[2])
    owner.open(evaluated)
    row = page.get_by_role("row").filter(has_text="all")
    expect(row).to_contain_text("regression")
    expect(row).to_contain_text(f"{report['slices'][0]['candidate']['mean']:.3f} [")
    first = page.get_by_role("article").first
    case = report["cases"][0]
    expect(first).to_have_accessible_name(f"Case {case['id']}")
    for model in ("candidate", "against", "base"):
        expect(first).to_contain_text(f"{case[model]['score']:.3f}")
    expect(first).to_contain_text(case["against"]["answer"].strip())
    expect(page.get_by_role("article")).to_have_count(len(PROMPTS))


def test_the_list_leads_to_the_evaluation(owner: Visitor, page: Page, evaluated: str) -> None:
    owner.open(f"/adapters/{TENANT}/bot/evaluations")
    row = page.get_by_role("table", name="Evaluations").get_by_role("row").nth(1)
    for text in ("version 1", "golden", "succeeded", "regression"):
        expect(row).to_contain_text(text)
    row.get_by_role("link", name="Version 2").click()
    expect(page.get_by_role("heading", name="Cases")).to_be_visible()


def test_a_golden_set_is_set_and_removed(owner: Visitor, page: Page, evaluated: str) -> None:
    owner.open(f"/adapters/{TENANT}/bot/evaluations")
    sets = page.get_by_role("table", name="Golden sets")
    page.get_by_role("button", name="Set a golden set").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("second")
    wrong = {"name": "x.jsonl", "mimeType": "", "buffer": b'{"id": "a"}\n'}
    dialog.get_by_label("File").set_input_files(wrong)  # type: ignore[arg-type]
    dialog.get_by_role("button", name="Set").click()
    expect(dialog.get_by_role("alert")).to_contain_text("line 1", timeout=EVALUATION_MS)
    case = {"id": "a", "prompt": "x", "expected": "y"}
    right = {"name": "x.jsonl", "mimeType": "", "buffer": json.dumps(case).encode()}
    dialog.get_by_label("File").set_input_files(right)  # type: ignore[arg-type]
    dialog.get_by_role("button", name="Set").click()
    expect(sets).to_contain_text("second", timeout=EVALUATION_MS)
    page.get_by_role("button", name="Remove second").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(sets).not_to_contain_text("second")


def test_a_gate_refuses_a_regression_with_its_slices(
    owner: Visitor, page: Page, caller: Caller, evaluated: str
) -> None:
    owner.open(f"/adapters/{TENANT}/bot/aliases")
    page.get_by_label("Gate").select_option("golden")
    expect(page.get_by_text("prod has a gate with golden.")).to_be_visible()
    panel = page.get_by_role("region", name="bot@prod")
    panel.get_by_label("Version", exact=True).select_option("2")
    panel.get_by_role("button", name="Apply").click()
    refusal = panel.get_by_role("alert")
    expect(refusal).to_contain_text("version 2 is worse than version 1")
    expect(refusal).to_contain_text("all -")
    assert grave_violations(page) == []
    assert caller.http.get("/v1/adapters/bot/aliases/prod").json()["version"] == 1
    refusal.get_by_role("link", name="Show the evaluations").click()
    expect(page.get_by_role("heading", name="Golden sets")).to_be_visible()
    owner.open(f"/adapters/{TENANT}/bot/aliases")
    page.get_by_label("Gate").select_option("")
    expect(page.get_by_text("prod has no gate.")).to_be_visible()


def test_the_pages_fit_a_phone_and_break_no_rule(
    browser: Browser, owner: Visitor, page: Page, evaluated: str
) -> None:
    for address in (evaluated, f"/adapters/{TENANT}/bot/evaluations"):
        owner.open(address)
        assert grave_violations(page) == []
        with visiting(browser, owner.url, viewport=PHONE, dark=True) as phone:
            phone.page.context.add_cookies(page.context.cookies())  # type: ignore[arg-type]
            phone.open(address)
            assert phone.overhang() <= 0
            assert grave_violations(phone.page, COLORS) == []


def test_a_viewer_sees_evaluations_and_changes_none(
    browser: Browser, seeded: Seeded, evaluated: str
) -> None:
    with visiting(browser, seeded.server.url) as viewer:
        token = invite_user(seeded, TENANT, f"viewer@{TENANT}.example")
        enrol(viewer.page.context, viewer.url, token)
        viewer.open(f"/adapters/{TENANT}/bot/evaluations")
        expect(viewer.page.get_by_role("link", name="Version 2")).to_be_visible()
        for name in ("Set a golden set", "Evaluate a version", "Remove golden"):
            expect(viewer.page.get_by_role("button", name=name)).to_have_count(0)
