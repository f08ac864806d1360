"""Fine-tuning jobs in the console: from the form to the version, and what goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from loraplex.api.demo.recipe import BASE_NAME
from support.accessibility import COLORS, grave_violations
from support.chromium import PHONE
from support.console import Visitor, enrol, invite_user, visiting
from support.seeded import Seeded
from support.server import Caller
from support.tuning_jobs import create, ended, examples

TENANT = "trainers"
ADAPTER = "helper"
NUM_EXAMPLES = 20
SCOPES = ["infer", "adapters:read", "adapters:write"]
TRAINING_MS = 60_000
ROW_PIXELS = 41
"""A row of 40 px with its border."""


@pytest.fixture(scope="module")
def caller(seeded: Seeded) -> Caller:
    """The key of a tenant that has no jobs."""
    tenant = seeded.change("POST", "/admin/tenants", {"slug": TENANT})
    for role in ("owner", "viewer"):
        user = {"email": f"{role}@{TENANT}.example", "role": role}
        seeded.change("POST", "/v1/users", user, tenant=TENANT)
    issued = seeded.change("POST", "/v1/keys", {"name": "ci", "scopes": SCOPES}, tenant=TENANT)
    caller = Caller(seeded.server.url, tenant["id"], TENANT, issued["key"])
    seeded.server.callers.append(caller)
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
def trained(owner: Visitor, page: Page) -> str:
    """The address of a job that was made in the form, paused, resumed, and has succeeded."""
    owner.open("/fine-tuning")
    expect(page.get_by_role("heading", name="No fine-tuning jobs")).to_be_visible()
    page.get_by_role("button", name="New job").click()
    page.get_by_label("Adapter").fill(ADAPTER)
    choose_file(page, "Training file to upload", "slow")
    page.get_by_label("Validation file", exact=True).select_option("")
    choose_file(page, "Validation file to upload")
    page.get_by_label("Epochs").fill("1")
    page.get_by_text("Advanced").click()
    page.get_by_label("Seed").fill("7")
    assert grave_violations(page) == []
    page.get_by_role("button", name="Create job").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Training of {ADAPTER}")
    expect(state_of(page)).to_have_text("running", timeout=TRAINING_MS)
    page.get_by_role("button", name="Pause").click()
    expect(state_of(page)).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(state_of(page)).to_have_text("succeeded", timeout=TRAINING_MS)
    owner.settle()
    return page.url.partition("/console")[2]


def choose_file(page: Page, label: str, words: str = "") -> None:
    content = {"name": "data.jsonl", "mimeType": "", "buffer": examples(words, NUM_EXAMPLES)}
    page.get_by_label(label).set_input_files(content)  # type: ignore[arg-type]


def state_of(page: Page) -> Locator:
    return page.locator(".figures .badge")


def test_the_form_orders_what_was_filled_in(caller: Caller, trained: str) -> None:
    job = caller.openai.fine_tuning.jobs.retrieve(trained.rpartition("/")[2])
    assert (job.model, job.seed, job.status) == (BASE_NAME, 7, "succeeded")
    assert job.hyperparameters.n_epochs == 1
    assert job.hyperparameters.batch_size == 8
    assert job.validation_file
    assert job.fine_tuned_model == f"{ADAPTER}@1"


def test_the_job_shows_its_curves_steps_and_events(
    owner: Visitor, page: Page, trained: str
) -> None:
    owner.open(trained)
    meter = page.get_by_role("meter", name=f"{NUM_EXAMPLES} of {NUM_EXAMPLES} steps")
    expect(meter).to_have_attribute("aria-valuenow", str(NUM_EXAMPLES))
    loss = page.get_by_role("img", name=re.compile("^Loss by step"))
    expect(loss).to_have_accessible_name(
        "Loss by step. Training: now 0.05, at most 1; Validation: now 0.5, at most 0.5"
    )
    accuracy = page.get_by_role("img", name=re.compile("^Accuracy by step"))
    expect(accuracy).to_have_accessible_name(re.compile("Training: now 50 %.*Validation: now 75 %"))
    expect(page.get_by_role("table", name="Events")).to_contain_text("The training is complete.")


def test_a_version_and_its_job_lead_to_each_other(owner: Visitor, page: Page, trained: str) -> None:
    owner.open(trained)
    page.get_by_role("link", name=f"{ADAPTER}@1").click()
    page.get_by_role("heading", name="Provenance").wait_for()
    page.get_by_role("link", name=trained.rpartition("/")[2]).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Training of {ADAPTER}")


def test_the_page_of_an_adapter_starts_the_training_of_a_version(
    owner: Visitor, page: Page, trained: str
) -> None:
    owner.open(f"/adapters/{TENANT}/{ADAPTER}")
    page.get_by_role("button", name="Train a version").click()
    expect(page.get_by_role("dialog").get_by_label("Adapter")).to_have_value(ADAPTER)
    assert grave_violations(page) == []
    page.get_by_role("button", name="Cancel").click()


def test_jobs_stand_in_rows_of_forty_pixels(owner: Visitor, page: Page, trained: str) -> None:
    owner.open("/fine-tuning")
    row = page.get_by_role("row").filter(has_text=ADAPTER)
    for text in ("succeeded", f"{NUM_EXAMPLES} of {NUM_EXAMPLES} steps", f"{ADAPTER}@1"):
        expect(row).to_contain_text(text)
    box = row.bounding_box()
    assert box is not None
    assert box["height"] <= ROW_PIXELS


def test_the_page_of_a_job_fits_a_phone_and_breaks_no_rule(
    browser: Browser, owner: Visitor, page: Page, trained: str
) -> None:
    owner.open(trained)
    assert grave_violations(page) == []
    with visiting(browser, owner.url, viewport=PHONE, dark=True) as phone:
        phone.page.context.add_cookies(page.context.cookies())  # type: ignore[arg-type]
        phone.open(trained)
        assert phone.overhang() <= 0
        assert grave_violations(phone.page, COLORS) == []


def test_a_failed_job_says_why_and_what_to_do(owner: Visitor, page: Page, caller: Caller) -> None:
    job = create(caller.openai, examples("wrong"), model=BASE_NAME)
    assert ended(caller.openai, job.id).status == "failed"
    owner.open(f"/fine-tuning/{job.id}")
    notice = page.locator(".notice.bad")
    for text in ("messages is missing", "Correct the line", "training_file"):
        expect(notice).to_contain_text(text)
    expect(page.get_by_role("button", name="Cancel job")).to_have_count(0)


def test_a_job_is_cancelled_after_a_question(owner: Visitor, page: Page, caller: Caller) -> None:
    job = create(caller.openai, examples("slow", 600), model=BASE_NAME)
    owner.open(f"/fine-tuning/{job.id}")
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("button", name="Keep training").click()
    expect(state_of(page)).to_have_text(re.compile("queued|running"))
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    expect(state_of(page)).to_have_text("cancelled")
    for name in ("Pause", "Resume", "Cancel job"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)


def test_the_memory_page_shows_a_trainer_while_it_runs(
    owner: Visitor, page: Page, caller: Caller
) -> None:
    job = create(caller.openai, examples("slow", 600), model=BASE_NAME)
    owner.open("/memory")
    row = page.get_by_role("region", name="Trainers").get_by_role("row").filter(has_text=job.id)
    expect(row).to_contain_text(re.compile(r"MB|MiB"), timeout=TRAINING_MS)
    assert grave_violations(page) == []
    caller.openai.fine_tuning.jobs.cancel(job.id)
    expect(row).to_have_count(0, timeout=TRAINING_MS)


def test_a_viewer_sees_jobs_and_changes_none(
    browser: Browser, seeded: Seeded, caller: Caller
) -> None:
    with visiting(browser, seeded.server.url) as viewer:
        token = invite_user(seeded, TENANT, f"viewer@{TENANT}.example")
        enrol(viewer.page.context, viewer.url, token)
        viewer.open("/")
        viewer.go("Fine-tuning")
        expect(viewer.page.get_by_role("heading", name=f"Jobs of {TENANT}")).to_be_visible()
        expect(viewer.page.get_by_role("button", name="New job")).to_have_count(0)


def test_a_server_without_fine_tuning_says_how_it_is_turned_on(owner: Visitor, page: Page) -> None:
    def answer(route: Route) -> None:
        real = route.fetch()
        view = real.json()
        view["server"]["tuning"] = False
        route.fulfill(response=real, body=json.dumps(view))

    page.route("**/v1/session", answer)
    try:
        owner.open("/fine-tuning")
        expect(page.locator(".notice")).to_contain_text("--tuning")
        expect(page.get_by_role("button", name="New job")).to_have_count(0)
    finally:
        page.unroute("**/v1/session")
