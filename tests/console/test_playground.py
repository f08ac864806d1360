"""The playground: what is sent, how answers are shown, and the code of a request."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from loraplex.api.demo.task import Style, held_out_requests
from support.accessibility import grave_violations
from support.console import Visitor, enrol, invite_user, visiting
from support.hostile_texts import hostile_texts
from support.seeded import Seeded

CHATS = "**/v1/chat/completions"
ASKED = held_out_requests(1)[0]
MARKDOWN = """# Steps

Use **care**, [read](https://docs.example/a) and ![chart](https://hostile.invalid/p.png?said=secret).

```sql
SELECT 1;
SELECT 2;
```

| a | b |
|---|---|
| 1 | 2 |

- [x] done
"""
ELEMENTS = frozenset(
    {
        "H4",
        "H5",
        "H6",
        "P",
        "EM",
        "STRONG",
        "DEL",
        "BLOCKQUOTE",
        "UL",
        "OL",
        "LI",
        "HR",
        "BR",
        "CODE",
    }
    | {"PRE", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "SPAN", "DIV", "SUP", "A"}
    | {"BUTTON", "svg", "path"}
)
"""What an answer may become; a button with its icon copies code."""


@pytest.fixture
def page(owner: Visitor) -> Iterator[Page]:
    owner.open("/playground?model=sql")
    yield owner.page
    owner.page.unroute(CHATS)


def ask(page: Page, prompt: str = ASKED.prompt) -> dict[str, Any]:
    """Send the prompt; the body of the request."""
    page.get_by_label("Prompt", exact=True).fill(prompt)
    with page.expect_request(CHATS) as asked:
        page.keyboard.press("Enter")
    return body_of(asked.value)


def body_of(request: Request) -> dict[str, Any]:
    body = request.post_data_json
    assert isinstance(body, dict)
    return body


def answered(owner: Visitor, num_turns: int = 1) -> None:
    """Wait until so many answers have ended."""
    expect(owner.page.get_by_role("button", name="Code", exact=True)).to_have_count(num_turns)
    owner.settle()


def answer_with(page: Page, *deltas: dict[str, Any]) -> None:
    """Answer the next requests with these deltas."""
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    page.unroute(CHATS)
    page.route(CHATS, lambda route: route.fulfill(status=200, headers=headers, body=stream))


def test_the_shown_code_gets_the_same_answer(owner: Visitor, page: Page, seeded: Seeded) -> None:
    page.get_by_label("System prompt").fill('It\'s "short" & $HOME\n`id`')
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Top k").fill("3")
    page.get_by_label("Stop strings").fill("\\n\\n")
    sent = ask(page)
    answered(owner)
    shown = page.locator(".turn-reply").inner_text().strip()
    page.get_by_role("button", name="Code", exact=True).click()
    dialog = page.get_by_role("dialog")
    code = dialog.locator("pre")
    key = seeded.callers["acme"].key

    shell = [
        "bash",
        "-c",
        code.inner_text().replace("YOUR_API_KEY", key).replace("curl", "curl -s", 1),
    ]
    by_curl = json.loads(subprocess.run(shell, capture_output=True, check=True).stdout)
    assert by_curl["choices"][0]["message"]["content"].strip() == shown
    assert by_curl["usage"]["completion_tokens"] > 0

    dialog.get_by_role("button", name="Python").click()
    script = code.inner_text().replace("YOUR_API_KEY", key)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == shown

    dialog.get_by_role("button", name="JavaScript").click()
    text = code.inner_text()
    body = json.loads(text[text.index("create(") + len("create(") : text.rindex(");\nconsole")])
    assert body == {k: v for k, v in sent.items() if k not in ("stream", "stream_options")}
    assert key not in text
    assert grave_violations(page) == []
    dialog.get_by_role("button", name="Close").click()


def test_a_sum_of_adapters_is_asked_by_its_name(owner: Visitor, page: Page) -> None:
    model = page.get_by_label("Model", exact=True)
    model.fill("sql+js")
    suggested = page.locator("datalist option")
    expect(suggested.first).to_have_attribute("value", re.compile(r"sql\+json"))
    model.fill("sql+json:0.5")
    assert ask(page)["model"] == "sql+json:0.5"
    answered(owner)
    expect(page.locator(".turn-reply").first).to_be_visible()
    expect(page.locator("main")).to_contain_text(re.compile(r"sql@\d+\+acme/json@\d+:0\.5"))


def test_every_parameter_is_sent_as_it_was_set(owner: Visitor, page: Page) -> None:
    for group in ("Sampling", "Output format", "Tools", "Token probabilities"):
        page.locator("summary", has_text=group).click()
    numbers = {
        "Max tokens": 4, "Temperature": 0.5, "Top p": 0.9, "Top k": 20, "Min p": 0.01,
        "Presence penalty": 0.5, "Frequency penalty": -0.5, "Repetition penalty": 1.1, "Seed": 7,
        "Answers": 2, "Alternatives": 3,
    }  # fmt: skip
    for label, number in numbers.items():
        page.get_by_label(label, exact=True).fill(str(number))
    page.get_by_label("Stop strings").fill("END\n\\n\\n")
    page.get_by_label("Logit bias").fill("7: -100\n8: 1.5")
    page.get_by_label("Reasoning effort").select_option("none")
    page.get_by_label("Format", exact=True).select_option("json_object")
    assert grave_violations(page) == []
    body = ask(page, "Hi")
    answered(owner)
    expect(page.get_by_role("alert")).to_have_count(0)
    assert body == {
        "model": "sql", "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "seed": 7,
        "n": 2, "logprobs": True, "top_logprobs": 3, "stop": ["END", "\n\n"],
        "logit_bias": {"7": -100, "8": 1.5}, "reasoning_effort": "none",
        "response_format": {"type": "json_object"},
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    page.get_by_role("button", name="Answer 2").click()
    expect(page.get_by_role("button", name="Answer 2")).to_have_attribute("aria-pressed", "true")


def test_a_parameter_that_cannot_be_sent_is_named_and_nothing_is_sent(page: Page) -> None:
    page.get_by_label("Prompt", exact=True).fill("Hi")
    page.get_by_text("Output format", exact=True).click()
    page.get_by_label("Format", exact=True).select_option("json_schema")
    schema = page.get_by_label("JSON schema")
    expect(page.get_by_text("A JSON schema is needed.")).to_be_visible()
    schema.fill('{"type": ')
    expect(page.get_by_text("Not JSON")).to_be_visible()
    expect(page.get_by_text("1 to correct")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("button", name="Insert example").first.click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    body = ask(page, "Hi")
    assert body["response_format"]["json_schema"]["schema"] == json.loads(schema.input_value())


def test_markdown_is_rendered_without_pictures_and_code_is_copied(
    owner: Visitor, page: Page
) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with(page, {"content": MARKDOWN})
    ask(page)
    answered(owner)
    reply = page.locator(".turn-reply")
    expect(reply.get_by_role("heading", name="Steps")).to_be_visible()
    expect(reply.get_by_role("link", name="read")).to_have_attribute(
        "rel", "noopener noreferrer nofollow"
    )
    expect(reply.get_by_role("cell", name="2")).to_be_visible()
    expect(reply.locator("img")).to_have_count(0)
    expect(reply).to_contain_text("[image: chart]")
    reply.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "SELECT 1;\nSELECT 2;"
    page.get_by_role("button", name="Copy answer").click()
    expect(page.get_by_role("button", name="Copied")).to_have_count(2)
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    assert owner.executed() == []
    assert grave_violations(page) == []
    page.get_by_role("button", name="Text", exact=True).click()
    assert reply.evaluate("e => e.textContent") == MARKDOWN


def test_markup_of_an_answer_becomes_harmless_elements_only(owner: Visitor, page: Page) -> None:
    texts = [
        *hostile_texts(),
        "[a](javascript:alert(1))",
        "![a](https://hostile.invalid/b)",
        "[^1]\n\n[^1]: b",
    ]
    answer_with(page, *({"content": f"{text}\n\n"} for text in texts))
    ask(page)
    answered(owner)
    reply = page.locator(".turn-reply")
    reply.locator("p").first.wait_for()
    facts = "one => [one.tagName, one.id, one.getAttribute('href')]"
    found = reply.evaluate(f"e => [...e.querySelectorAll('*')].map({facts})")
    assert {tag for tag, _, _ in found} <= ELEMENTS
    assert {identifier for _, identifier, _ in found} == {""}
    links = [href for _, _, href in found if href is not None]
    assert all(href.lower().startswith(("http://", "https://", "mailto:")) for href in links)
    assert owner.executed() == []


def test_a_prompt_can_be_edited_and_an_answer_made_again(owner: Visitor, page: Page) -> None:
    answer_with(page, {"content": "first"})
    ask(page, "one")
    answered(owner, 1)
    second = ask(page, "two")
    assert [message["content"] for message in second["messages"]] == ["one", "first", "two"]
    answered(owner, 2)
    answer_with(page, {"content": "other"})
    with page.expect_request(CHATS) as again:
        page.get_by_role("button", name="Regenerate").click()
    assert body_of(again.value) == second
    answered(owner, 2)
    expect(page.locator(".turn-reply").last).to_have_text("other")

    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.get_by_label("Edit the prompt").fill("three")
    with page.expect_request(CHATS) as edited:
        page.get_by_role("button", name="Ask again").click()
    assert body_of(edited.value)["messages"] == [{"role": "user", "content": "three"}]
    answered(owner, 1)
    expect(page.locator(".turn-prompt")).to_have_text("three")


def test_a_stopped_answer_says_so(owner: Visitor, page: Page) -> None:
    waiting: list[Route] = []
    page.route(CHATS, lambda route: waiting.append(route))
    ask(page)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_the_results_of_called_tools_are_sent_back(owner: Visitor, page: Page) -> None:
    page.locator("summary", has_text="Tools").click()
    page.get_by_role("button", name="Insert example").last.click()
    page.get_by_label("Tool choice").select_option("required")
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    rest = {"index": 0, "function": {"arguments": '{"city":"Oslo"}'}}
    answer_with(page, {"tool_calls": [call]}, {"tool_calls": [rest]})
    body = ask(page, "Oslo?")
    assert body["tool_choice"] == "required"
    assert body["tools"][0]["function"]["name"] == "weather"
    answered(owner)
    expect(page.get_by_role("region", name="Arguments of weather")).to_contain_text(
        '"city": "Oslo"'
    )
    page.get_by_label("Result of weather").fill("rain")
    answer_with(page, {"content": "It rains."})
    with page.expect_request(CHATS) as sent:
        page.get_by_role("button", name="Send results").click()
    function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert body_of(sent.value)["messages"] == [
        {"role": "user", "content": "Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answered(owner, 2)
    expect(page.get_by_text("It rains.")).to_be_visible()


def test_tokens_are_shown_with_the_probabilities_that_the_api_gives(
    owner: Visitor, page: Page, seeded: Seeded
) -> None:
    page.get_by_role("button", name="Tokens").click()
    ask(page)
    answered(owner)
    completion = seeded.callers["acme"].openai.chat.completions.create(
        model="sql", messages=[{"role": "user", "content": ASKED.prompt}],
        max_tokens=256, temperature=0, logprobs=True, top_logprobs=5,
    )  # fmt: skip
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    options = page.locator(".tokens > span")
    expect(options).to_have_count(len(logprobs.content))
    tokens = options.evaluate_all("all => all.map(one => one.textContent)")
    assert tokens == [token.token for token in logprobs.content]
    assert "".join(tokens).strip() == ASKED.answer(Style.SQL)
    labels = options.evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    shown = [float(label.rpartition(", ")[2].removesuffix(" %")) for label in labels]
    assert shown == pytest.approx(
        [100 * math.exp(token.logprob) for token in logprobs.content], abs=0.6
    )

    options.first.focus()
    page.keyboard.press("ArrowRight")
    expect(options.nth(1)).to_be_focused()
    alternatives = page.locator(".alternatives tbody tr")
    expect(alternatives).to_have_count(len(logprobs.content[1].top_logprobs))
    expect(alternatives.first).to_contain_text(
        json.dumps(logprobs.content[1].top_logprobs[0].token)
    )
    options.first.hover()
    expect(page.get_by_text("Token 1:")).to_be_visible()
    assert grave_violations(page) == []


def test_who_may_not_generate_is_told_why(browser: Browser, seeded: Seeded) -> None:
    with visiting(browser, seeded.server.url) as viewer:
        enrol(
            viewer.page.context, seeded.server.url, invite_user(seeded, "acme", "eve@acme.example")
        )
        viewer.open("/playground")
        expect(viewer.page.get_by_text("Your role does not permit the playground")).to_be_visible()
        expect(viewer.page.get_by_text("viewer does not have")).to_be_visible()
        places = viewer.page.get_by_role("navigation", name="Pages")
        expect(places.get_by_role("link", name="Playground")).to_have_count(0)
        expect(viewer.page.get_by_label("Prompt", exact=True)).to_have_count(0)
        assert grave_violations(viewer.page) == []
