"""Classification adapters in the console: named by their task, and not offered for chats."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from loraplex.api.demo.manifest import WEIGHTS
from support.classifiers import name_labels, save_classifier
from support.console import Visitor
from support.seeded import Seeded

TENANT = "labellers"
CLASSIFIER, BOT = "topics", "writer"


@pytest.fixture(scope="module")
def labellers(seeded: Seeded, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tenant with an adapter of each task."""
    folder = tmp_path_factory.mktemp("topics") / "topics"
    save_classifier(WEIGHTS / "base", folder, num_labels=2, seed=3)
    name_labels(folder, ["sport", "weather"])
    caller = seeded.server.make_caller(TENANT)
    caller.push(folder, CLASSIFIER)
    caller.push(WEIGHTS / "sql", BOT)
    return TENANT


@pytest.fixture
def page(operator: Visitor, labellers: str) -> Page:
    operator.open("/settings")
    operator.pick(labellers)
    return operator.page


def test_the_list_and_the_versions_name_the_task(operator: Visitor, page: Page) -> None:
    operator.open("/adapters")
    for name, task in ((CLASSIFIER, "classify"), (BOT, "generate")):
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
        expect(row.get_by_role("cell", name=task, exact=True)).to_be_visible()
    for name, task in ((CLASSIFIER, "classify"), (BOT, "generate")):
        operator.open(f"/adapters/{TENANT}/{name}")
        versions = page.get_by_role("table", name="Versions")
        expect(versions.get_by_role("cell", name=task, exact=True)).to_be_visible()


def test_only_models_that_generate_can_be_tried(operator: Visitor, page: Page) -> None:
    operator.open(f"/adapters/{TENANT}/{CLASSIFIER}")
    expect(page.get_by_role("button", name="Try it")).to_have_count(0)
    operator.open(f"/adapters/{TENANT}/{BOT}")
    expect(page.get_by_role("button", name="Try it")).to_be_visible()


def test_the_playground_suggests_no_classifier_and_says_why(operator: Visitor, page: Page) -> None:
    operator.open("/playground")
    suggested = page.locator("datalist option")
    expect(suggested.and_(page.locator(f"[value={BOT}]"))).to_have_count(1)
    expect(page.locator(f"datalist option[value^={CLASSIFIER}]")).to_have_count(0)
    reason = page.get_by_text("This adapter is a classifier and generates no text.")
    expect(reason).to_have_count(0)
    page.get_by_label("Model", exact=True).fill(CLASSIFIER)
    expect(reason).to_be_visible()
    page.get_by_label("Model", exact=True).fill(f"{CLASSIFIER}@1")
    expect(reason).to_be_visible()
    page.get_by_label("Model", exact=True).fill(BOT)
    expect(reason).to_have_count(0)
    page.get_by_label("Model", exact=True).fill(CLASSIFIER)
    page.get_by_label("Prompt", exact=True).fill("Rain again")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("classifier_only")
