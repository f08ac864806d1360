"""The playground with a model that reasons."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from support.accessibility import grave_violations
from support.console import Visitor, enrol, invite_operator, visiting
from support.hostile_texts import hostile_texts
from support.seeded import Seeded
from support.server import serving
from support.thinking import CLOSING, make_thinking_base

TENANT = "thinkers"
CHATS = "**/v1/chat/completions"
TEXTS = hostile_texts()


@pytest.fixture(scope="module")
def visitor(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    """An operator of a server whose base reasons, looking at one tenant."""
    base: Path = tmp_path_factory.mktemp("thinking") / "thinking"
    make_thinking_base(base)
    with serving(base, tmp_path_factory.mktemp("thinking-server")) as server:
        server.make_caller(TENANT)
        of_thinking = Seeded(server, server.make_operator("root"), {})
        with visiting(browser, server.url) as one:
            enrol(one.page.context, server.url, invite_operator(of_thinking))
            one.open("/settings")
            one.pick(TENANT)
            yield one
        of_thinking.admin.close()


@pytest.fixture
def page(visitor: Visitor) -> Iterator[Page]:
    visitor.open("/playground")
    visitor.page.get_by_role("button", name="Text", exact=True).click()
    yield visitor.page
    visitor.page.unroute(CHATS)


def ask(page: Page) -> None:
    page.get_by_label("Prompt", exact=True).fill("Is it?")
    page.keyboard.press("Enter")


def with_bias(bias: float, told: list[str]) -> Any:
    """Handles requests: makes the end of the reasoning likely or not, and notes the stream."""

    def handle(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        body |= {"logit_bias": {str(CLOSING): bias}, "seed": 1}
        response = route.fetch(post_data=json.dumps(body))
        told.append(response.text())
        route.fulfill(response=response)

    return handle


def parts_of(stream: str) -> tuple[str, str]:
    """The reasoning and the answer of a stream of chunks."""
    lines = [
        line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")
    ]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return reasoning, "".join(delta.get("content") or "" for delta in deltas)


def stream_of(*deltas: dict[str, str]) -> str:
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_reasoning_is_collapsed_before_the_answer(visitor: Visitor, page: Page) -> None:
    told: list[str] = []
    page.route(CHATS, with_bias(5, told))
    ask(page)
    page.get_by_role("link", name="trace").wait_for()
    visitor.settle()
    reasoning, answer = parts_of(told[0])
    assert reasoning
    assert answer
    thought = page.locator(".turn-reasoning")
    expect(thought).to_be_hidden()
    assert page.locator(".turn-reply").evaluate("e => e.textContent") == answer
    page.get_by_text("Reasoning", exact=True).click()
    expect(thought).to_be_visible()
    assert thought.evaluate("e => e.textContent") == reasoning


def test_reasoning_without_an_answer_stays_open_and_says_why(visitor: Visitor, page: Page) -> None:
    told: list[str] = []
    page.route(CHATS, with_bias(-100, told))
    page.get_by_label("Max tokens").fill("8")
    ask(page)
    page.get_by_role("link", name="trace").wait_for()
    visitor.settle()
    reasoning, answer = parts_of(told[0])
    assert reasoning
    assert not answer
    expect(page.locator(".turn-reasoning")).to_be_visible()
    assert page.locator(".turn-reasoning").evaluate("e => e.textContent") == reasoning
    expect(page.get_by_text("the reasoning reached Max tokens")).to_be_visible()
    assert grave_violations(page) == []


def test_reasoning_and_answer_are_shown_as_text(visitor: Visitor, page: Page) -> None:
    deltas = [{"reasoning_content": text} for text in TEXTS] + [{"content": text} for text in TEXTS]
    stream = stream_of(*deltas)
    headers = {"content-type": "text/event-stream"}
    page.route(CHATS, lambda route: route.fulfill(status=200, headers=headers, body=stream))
    ask(page)
    expect(page.locator(".turn-reply")).not_to_be_empty()
    visitor.settle()
    page.get_by_text("Reasoning", exact=True).click()
    assert visitor.executed() == []
    for part in (".turn-reasoning", ".turn-reply"):
        assert page.locator(part).evaluate("e => e.textContent") == "".join(TEXTS)
        assert page.locator(part).evaluate("e => e.childElementCount") == 0
