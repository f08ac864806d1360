"""A page shows data of the displayed tenant, session and time, or says that it is stale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from support.accessibility import grave_violations
from support.console import Visitor, enrol, invite_user, visiting
from support.seeded import REPLICA, Seeded

OTHERS = "owner@globex.example"
LIMITS = "/admin/tenants/globex/quota"


@pytest.fixture
def visitor(operator: Visitor, browser: Browser, seeded: Seeded) -> Iterator[Visitor]:
    """The operator in a browser of its own, looking at `acme`."""
    with visiting(browser, seeded.server.url) as one:
        one.page.context.add_cookies(operator.page.context.cookies())  # type: ignore[arg-type]
        one.open("/settings")
        one.pick("acme")
        yield one


@pytest.fixture
def tabs(browser: Browser, seeded: Seeded) -> Iterator[tuple[Visitor, Page]]:
    """Two tabs of one browser, in which a user of `globex` is signed in."""
    with visiting(browser, seeded.server.url) as one:
        enrol(one.page.context, seeded.server.url, invite_user(seeded, "globex", OTHERS))
        second = one.page.context.new_page()
        one.page.context.clock.install()
        for page in (one.page, second):
            page.goto(f"{one.url}/console/settings")
            page.get_by_role("button", name="Sign out").wait_for()
        yield one, second


def refuse(route: Route) -> None:
    error = {"message": "Not now.", "code": "overloaded", "param": None, "request_id": "r"}
    route.fulfill(status=403, json={"error": error})


def hold(route: Route) -> None:
    """Its answer never comes."""


def show_tenant(page: Page, slug: str) -> None:
    page.get_by_label("Tenant", exact=True).fill(slug)
    page.keyboard.press("Enter")


def test_nothing_of_the_tenant_before_is_in_sight_while_the_next_ones_loads(
    visitor: Visitor,
) -> None:
    visitor.open("/adapters")
    page = visitor.page
    expect(page.get_by_role("link", name="assistant")).to_be_visible()
    page.route("**/v1/adapters?*", hold)
    show_tenant(page, "globex")
    expect(page.locator(".loading")).to_be_visible()
    assert "assistant" not in page.locator("main").inner_text()


def test_rows_that_stand_in_for_others_lead_to_no_next_page(visitor: Visitor) -> None:
    page = visitor.page

    def answer(route: Route) -> None:
        if "after=" in route.request.url:
            return
        body: dict[str, Any] = route.fetch().json()
        route.fulfill(json={**body, "has_more": True, "next_after": "1"})

    page.route("**/v1/audit?*", answer)
    visitor.open("/audit")
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_role("button", name="Previous")).to_be_enabled()
    expect(page.get_by_role("button", name="Next")).to_be_disabled()


def test_figures_that_cannot_be_had_anew_stand_under_the_error(visitor: Visitor) -> None:
    visitor.open("/memory")
    page = visitor.page
    page.route("**/v1/memory", refuse)
    expect(page.get_by_role("alert")).to_contain_text("overloaded")
    expect(page.get_by_role("heading", name="Device arena")).to_be_visible()


def test_a_replica_is_drained_and_resumed(visitor: Visitor, seeded: Seeded) -> None:
    visitor.open("/replicas")
    page = visitor.page
    row = page.get_by_role("row").filter(has_text=REPLICA)
    expect(row).to_contain_text("unseen")
    for deed, target in (("Drain", "draining"), ("Resume", "serving")):
        row.get_by_role("button", name=f"{deed} {REPLICA}").click()
        page.get_by_role("dialog").get_by_role("button", name=deed, exact=True).click()
        expect(row.get_by_text(target, exact=True)).to_be_visible()
        (kept,) = seeded.admin.get("/admin/replicas").json()["data"]
        assert kept["is_draining"] is (target == "draining")
    assert visitor.executed() == []


def test_a_replica_shows_its_figures_or_why_it_is_out_of_reach(visitor: Visitor) -> None:
    figures = {"num_running": 31, "num_waiting": 32, "max_batch": 33, "num_restarts": 34}
    adapters = {"num_resident": 35, "num_loading": 36, "kv_usage": 0.37}
    device = {"arena_bytes": 38 << 30, "device": "cuda:0", "role": "decode"}
    handovers = {
        **{"num_complete": 39, "num_given_up": 40, "num_bytes": 41 << 20},
        **{"complete_per_second": 4.2, "bytes_per_second": 43 << 20},
    }
    texts = ["31 of 33", "32", "34", "35", "36 loading", "37 %", "cuda:0, 38.0 GiB"]
    texts += ["decode", "4.2/s", "43.0 MiB/s", "40 given up"]
    connections: list[dict[str, Any]] = [{"state": "ready", "failure": None}]

    def answer(route: Route) -> None:
        body: dict[str, Any] = route.fetch().json()
        body["data"][0]["connection"] = {
            **{**figures, **adapters, **device, "handovers": handovers},
            **connections[-1],
        }
        route.fulfill(json=body)

    page = visitor.page
    page.route("**/admin/replicas", answer)
    visitor.open("/replicas")
    row = page.get_by_role("row").filter(has_text=REPLICA)
    expect(row).to_contain_text("ready")
    shown = row.inner_text()
    assert [text for text in texts if text not in shown] == []
    failure = {"code": "replica_lost", "message": "It fell silent."}
    connections.append({"state": "refusing", "failure": failure})
    expect(row).to_contain_text("replica_lost")
    expect(row).to_contain_text("It fell silent.")
    assert [text for text in texts if text in row.inner_text()] == []


def test_limits_that_somebody_else_has_changed_are_not_overwritten(
    visitor: Visitor, seeded: Seeded
) -> None:
    visitor.open("/tenants/globex")
    page = visitor.page
    page.get_by_role("button", name="Change limits").click()
    page.get_by_label("Keys", exact=True).fill("77")
    before = seeded.admin.get(LIMITS).json()
    theirs = {name: value for name, value in before.items() if name not in ("object", "tenant")}
    seeded.change("PUT", LIMITS, {**theirs, "users": 55})
    try:
        page.get_by_role("button", name="Save limits").click()
        expect(page.get_by_role("alert")).to_contain_text("etag_mismatch")
        kept = seeded.admin.get(LIMITS).json()
        assert (kept["users"], kept["keys"]) == (55, before["keys"])
    finally:
        seeded.change("PUT", LIMITS, theirs)


def test_the_memory_of_each_rank_of_a_group_is_shown(visitor: Visitor) -> None:
    sizes = ("resident", "weight", "kv", "arena", "arena_used", "host", "host_used")
    texts = ["31.0 GiB", "32.0 GiB", "33.0 GiB", "35.0 GiB of 34.0 GiB", "37.0 GiB of 36.0 GiB"]

    def answer(route: Route) -> None:
        body: dict[str, Any] = route.fetch().json()
        memory = {f"{size}_bytes": (31 + i) << 30 for i, size in enumerate(sizes)}
        body["servers"][0]["ranks"] = [
            {"rank": rank, "age_seconds": rank / 2, **memory} for rank in (0, 1)
        ]
        route.fulfill(json=body)

    page = visitor.page
    visitor.pick(None)
    visitor.open("/memory")
    expect(page.get_by_role("heading", name="Device arena")).to_be_visible()
    expect(page.get_by_role("heading", name="Ranks")).to_have_count(0)
    page.route("**/admin/memory", answer)
    rows = page.get_by_role("region", name="Ranks").get_by_role("row")
    expect(rows).to_have_count(3)
    shown = rows.nth(2).inner_text()
    assert [text for text in ["1", *texts, "500 ms ago"] if text not in shown] == []


def test_the_tiers_of_prefixes_and_the_border_are_shown_to_operators(visitor: Visitor) -> None:
    names = ("used_bytes", "capacity_bytes", "copied_in_bytes", "copied_out_bytes")
    sizes = {name: (31 + index) << 30 for index, name in enumerate(names)}
    disk = {"tier": "disk", **sizes, "hit_tokens": 35, "evicted_blocks": 36}
    border = {"kv_cache_bytes": 37 << 30, "arena_bytes": 38 << 30, "moves": 39}

    def answer(route: Route) -> None:
        body: dict[str, Any] = route.fetch().json()
        body["servers"][0]["prefixes"].append(disk)
        body["servers"][0]["border"] = border
        route.fulfill(json=body)

    page = visitor.page
    visitor.pick(None)
    page.route("**/admin/memory", answer)
    visitor.open("/memory")
    tiers = page.get_by_role("region", name="Prefix cache").get_by_role("row")
    expect(tiers.nth(1)).to_contain_text("device")
    shown = tiers.last.inner_text()
    texts = ["disk", "31.0 GiB of 32.0 GiB", "35", "33.0 GiB", "34.0 GiB", "36"]
    assert [text for text in texts if text not in shown] == []
    expect(page.get_by_role("img", name="KV cache 37.0 GiB, arena 38.0 GiB")).to_be_visible()
    expect(page.get_by_text("the border has moved 39 times")).to_be_visible()
    assert grave_violations(page) == []
    visitor.pick("acme")
    visitor.open("/memory")
    expect(page.get_by_role("heading", name="KV cache", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Prefix cache")).to_have_count(0)


def test_objectives_are_shown_where_requests_have_some(visitor: Visitor) -> None:
    results = {"met": 31, "ttft": 4, "itl": 3, "refused": 2, "failed": 0}
    objective = {"set_by": "tenant", **results, "attained_share": 0.775}

    def answer(route: Route) -> None:
        body: dict[str, Any] = route.fetch().json()
        length = len(body["times"])
        body["series"]["attained_share"] = [None] * (length - 2) + [0.5, 0.775]
        body["series"]["goodput_per_second"] = [None] * (length - 2) + [1.0, 1.25]
        body["objectives"] = [objective]
        route.fulfill(json=body)

    page = visitor.page
    visitor.open("/")
    expect(page.get_by_role("heading", name="Time to first token")).to_be_visible()
    expect(page.get_by_role("heading", name="Service level objectives")).to_have_count(0)
    expect(page.get_by_text("Objectives attained")).to_have_count(0)
    page.route("**/v1/overview?*", answer)
    visitor.open("/")  # anew, as the page is refreshed seldom
    rows = page.get_by_role("region", name="Service level objectives").get_by_role("row")
    expect(rows).to_have_count(2)
    cells = rows.last.get_by_role("cell")
    assert cells.all_inner_texts() == ["tenant", "78 %", "31", "4", "3", "2", "0"]
    expect(page.get_by_text("goodput 1.25 per second")).to_be_visible()
    expect(page.get_by_role("heading", name="Attained share of objectives")).to_be_visible()
    assert grave_violations(page) == []
    visitor.open("/tenants/acme")
    expect(page.get_by_text("78 % of 40 requests")).to_be_visible()


def test_who_goes_first_is_said_only_to_those_who_are_told(visitor: Visitor) -> None:
    page = visitor.page
    goes = page.get_by_role("columnheader", name="Evict order")
    visitor.open("/memory")
    expect(page.get_by_text("stays", exact=True)).to_have_count(0)
    expect(goes).to_have_count(0)
    visitor.pick(None)
    visitor.open("/memory")
    expect(goes).to_have_count(1)


def test_usage_is_narrowed_to_the_base_model(visitor: Visitor) -> None:
    visitor.open("/usage")
    page = visitor.page
    with page.expect_response("**/admin/usage?*adapter=&*") as answer:
        page.get_by_label("Model", exact=True).select_option("base")
    assert answer.value.ok
    visitor.settle()
    expect(page.get_by_role("table").get_by_role("cell", name="assistant")).to_have_count(0)


def test_a_page_that_fails_leaves_the_others(visitor: Visitor) -> None:
    page = visitor.page
    page.route("**/console/assets/usage-*.js", lambda route: route.abort())
    visitor.open("/settings")
    visitor.go("Usage")
    expect(page.get_by_role("heading", name="This page could not be displayed")).to_be_visible()
    visitor.go("Keys")
    expect(page.get_by_role("heading", level=1, name="Keys")).to_be_visible()


def test_a_click_beside_a_dialog_loses_nothing(visitor: Visitor) -> None:
    visitor.open("/keys")
    page = visitor.page
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill("half typed")
    page.mouse.click(5, 5)
    expect(page.get_by_label("Name", exact=True)).to_have_value("half typed")


def test_a_verification_ends_with_its_page(visitor: Visitor) -> None:
    page = visitor.page
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        piece = {"is_finished": False, "is_intact": True, "last_number": len(asked), "breach": None}
        route.fulfill(content_type="application/json", body=json.dumps(piece))

    page.route("**/admin/audit/verification*", answer)
    visitor.open("/audit")
    page.get_by_role("button", name="Verify the chain").click()
    page.get_by_text("verified up to entry").wait_for()
    visitor.go("Settings")
    page.wait_for_load_state("networkidle")
    before = len(asked)
    page.evaluate("fetch('/v1/session')")
    visitor.go("Keys")
    assert len(asked) == before


def test_who_could_not_sign_out_is_told(visitor: Visitor) -> None:
    visitor.open("/settings")
    page = visitor.page
    page.route("**/v1/session", lambda route: route.abort())
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_text("You are still signed in.")).to_be_visible()
    expect(page.get_by_role("heading", level=1, name="Settings")).to_be_visible()


def test_who_works_in_one_tab_is_not_signed_out_by_another(tabs: tuple[Visitor, Page]) -> None:
    one, other = tabs
    clock = one.page.context.clock
    clock.fast_forward("20:00")
    other.keyboard.press("Shift")
    clock.fast_forward("20:00")
    expect(other.get_by_role("button", name="Sign out")).to_be_visible()
    expect(one.page.get_by_role("button", name="Sign out")).to_be_visible()
    clock.fast_forward("31:00")
    expect(one.page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()


def test_tabs_that_are_idle_are_signed_out_while_the_server_does_not_know_yet(
    tabs: tuple[Visitor, Page],
) -> None:
    one, other = tabs
    held: list[Route] = []
    found: list[str] = []

    def hold(route: Route) -> None:
        if route.request.method == "DELETE":
            held.append(route)
            return
        found.append(route.request.url)
        route.continue_()

    one.page.context.route("**/v1/session", hold)
    one.page.context.clock.fast_forward("31:00")
    for page in (one.page, other):
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert found == [], "a tab looked whether the session lives, and found that it does"
    assert len(held) == 2
    for route in held:
        route.continue_()
    for page in (one.page, other):
        page.wait_for_load_state("networkidle")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_signing_out_in_one_tab_clears_the_others(tabs: tuple[Visitor, Page]) -> None:
    one, other = tabs
    other.get_by_role("button", name="Sign out").click()
    expect(one.page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert OTHERS not in one.page.content()


def test_a_tenant_is_picked_when_its_name_is_whole(visitor: Visitor) -> None:
    visitor.pick(None)
    visitor.open("/settings")
    page = visitor.page
    field = page.get_by_label("Tenant", exact=True)
    field.press_sequentially("acme")
    expect(page.get_by_role("button", name="Show all tenants")).to_have_count(0)
    field.press_sequentially("-eu")
    page.keyboard.press("Tab")
    expect(page.get_by_text("No tenant has the slug 'acme-eu'.")).to_be_visible()
    field.press_sequentially("acme")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Show all tenants")).to_be_visible()


def test_an_alias_that_is_refused_keeps_its_name(visitor: Visitor) -> None:
    visitor.open("/adapters/acme/sql/aliases")
    page = visitor.page
    page.route("**/aliases/beta", refuse)
    page.get_by_label("Name", exact=True).fill("beta")
    page.get_by_role("button", name="Set alias").click()
    expect(page.get_by_role("alert")).to_contain_text("overloaded")
    expect(page.get_by_label("Name", exact=True)).to_have_value("beta")
