"""Samples of requests in the console: an owner turns sampling on, and an operator cannot."""

from __future__ import annotations

from playwright.sync_api import expect

from support.accessibility import grave_violations
from support.chromium import PHONE
from support.console import PASSWORD, Visitor
from support.seeded import Seeded

ADDRESS = "/adapters/acme/sql/samples"
ONE_TOKEN = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "ignore_eos": True}


def test_an_owner_turns_sampling_on_sees_samples_and_deletes_them(
    owner: Visitor, seeded: Seeded
) -> None:
    page = owner.page
    owner.open(ADDRESS)
    expect(page.get_by_role("heading", name="Sampling is off")).to_be_visible()
    page.get_by_role("button", name="Turn on").click()
    page.get_by_label("Share of the requests (%)").fill("100")
    page.get_by_label("Days to keep a sample").fill("3")
    assert grave_violations(page) == []
    page.get_by_role("dialog").get_by_role("button", name="Turn on").click()
    panel = page.get_by_role("region", name="Samples of requests")
    expect(panel).to_contain_text("100 % of the requests")
    expect(panel).to_contain_text("3 days")
    asked = {"model": "sql", **ONE_TOKEN}
    seeded.callers["acme"].http.post("/v1/chat/completions", json=asked).raise_for_status()
    owner.open(ADDRESS)
    expect(panel).to_contain_text("Samples1")
    assert grave_violations(page) == []
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    assert owner.overhang() == 0
    page.get_by_role("button", name="Open smp_").click()
    dialog = page.get_by_role("dialog", name="Sample of sql")
    expect(dialog.get_by_role("heading", name="user")).to_be_visible()
    expect(dialog.get_by_text("Hi", exact=True)).to_be_visible()
    expect(dialog.get_by_role("heading", name="answer")).to_be_visible()
    assert grave_violations(page) == []
    dialog.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Export").click()
    page.get_by_role("button", name="Make file").click()
    expect(page.get_by_role("dialog")).to_contain_text("no sample to export")
    page.get_by_role("button", name="Cancel").click()
    seeded.callers["acme"].http.post("/v1/chat/completions", json=asked).raise_for_status()
    owner.open(ADDRESS)
    expect(panel).to_contain_text("Samples2")
    page.get_by_role("button", name="Open smp_").first.click()
    dialog.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete permanently").click()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Confirm").click()
    expect(page.get_by_text("1 sample deleted.")).to_be_visible()
    expect(page.get_by_role("button", name="Open smp_")).to_have_count(1)
    page.get_by_role("button", name="Turn off").click()
    page.get_by_role("dialog").get_by_role("button", name="Turn off").click()
    expect(panel).to_contain_text("Samplingoff")
    page.get_by_role("button", name="Delete samples").click()
    page.get_by_role("button", name="Delete permanently").click()
    expect(page.get_by_role("heading", name="Sampling is off")).to_be_visible()
    assert owner.executed() == []


def test_an_operator_sees_whether_an_adapter_is_sampled_and_can_change_nothing(
    operator: Visitor,
) -> None:
    operator.open("/")
    operator.pick("acme")
    operator.open(ADDRESS)
    page = operator.page
    expect(page.get_by_role("heading", name="Sampling is off")).to_be_visible()
    for action in ("Turn on", "Export", "Delete samples", "Open smp_"):
        expect(page.get_by_role("button", name=action)).to_have_count(0)
    operator.open("/keys")
    page.get_by_role("button", name="New key").first.click()
    expect(page.get_by_role("dialog").get_by_text("infer", exact=True)).to_be_visible()
    expect(page.get_by_role("dialog").get_by_text("samples:read")).to_have_count(0)
