"""Classification adapters in the console: named by their task, and not offered for chats."""

from __future__ import annotations

import json
import subprocess

import pytest
from playwright.sync_api import Page, expect

from loraplex.api.demo.manifest import WEIGHTS
from support.accessibility import grave_violations
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


def test_a_classifier_is_called_at_its_own_route(
    operator: Visitor, page: Page, seeded: Seeded, labellers: str
) -> None:
    operator.open(f"/adapters/{TENANT}/{CLASSIFIER}/call")
    code = page.get_by_role("region", name="Code, curl").inner_text()
    assert "/v1/classify" in code
    key = next(one.key for one in seeded.server.callers if one.slug == labellers)
    shell = code.replace("YOUR_API_KEY", key).replace("curl", "curl -s", 1)
    answer = subprocess.run(["bash", "-c", shell], capture_output=True, check=True)
    assert json.loads(answer.stdout)["data"][0]["label"] in ("sport", "weather")
    operator.open(f"/adapters/{TENANT}/{BOT}/call")
    page.get_by_label("Model", exact=True).select_option(f"{BOT}@1")
    text = page.get_by_role("region", name="Code, curl")
    expect(text).to_contain_text("/v1/chat/completions")
    expect(text).to_contain_text(f'"model": "{BOT}@1"')
    assert grave_violations(page) == []


def test_an_adapter_that_generates_can_also_be_called_for_embeddings(
    operator: Visitor, page: Page, seeded: Seeded
) -> None:
    operator.open(f"/adapters/{TENANT}/{BOT}/call")
    page.get_by_role("group", name="Task").get_by_role("button", name="Embeddings").click()
    code = page.get_by_role("region", name="Code, curl").inner_text()
    assert "/v1/embeddings" in code
    (caller,) = [one for one in seeded.server.callers if one.slug == TENANT]
    script = code.replace("YOUR_API_KEY", caller.key)
    answered = subprocess.run(["sh", "-c", script], capture_output=True, check=True, timeout=60)
    vectors = json.loads(answered.stdout)["data"]
    assert [len(each["embedding"]) > 0 for each in vectors] == [True, True]
    page.get_by_role("button", name="Python").click()
    expect(page.get_by_role("region", name="Code, Python")).to_contain_text(
        "client.embeddings.create("
    )
