"""Text that looks like markup is displayed as text in the console; nothing is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from playwright.sync_api import Page, Route

from support.console import PAGES, Visitor
from support.hostile_texts import FIELD_LENGTH, hostile_texts
from support.seeded import Seeded

TEXTS = hostile_texts()
MOMENT = re.compile(r"\d{4}-\d\d-\d\d")
KEPT = frozenset({"object", "next_after", "csrf_token", "kind", "scopes"})
"""What steers the console's requests, and is never shown as it is."""


def test_the_corpus_has_a_hundred_texts_that_fit_into_every_field() -> None:
    assert len(set(TEXTS)) == len(TEXTS) == 100
    assert max(map(len, TEXTS)) <= FIELD_LENGTH


def test_a_page_that_took_the_corpus_for_markup_would_be_found_out(operator: Visitor) -> None:
    """The watch itself, on a page without a policy that does what the console must not."""
    context = operator.page.context
    with context.new_page() as page:
        visitor = Visitor(page, "http://127.0.0.1:1")
        page.goto("about:blank")
        leaving = ("<meta", "<base")
        page.set_content("".join(text for text in TEXTS if not text.startswith(leaving)))
        page.wait_for_timeout(200)
        assert "window.executed is set" in visitor.executed()
        assert any(fault.startswith("dialog") for fault in visitor.faults)
        assert any("hostile.invalid" in fault for fault in visitor.faults)


@pytest.mark.parametrize("name", PAGES)
def test_every_string_of_every_answer_is_shown_as_text(operator: Visitor, name: str) -> None:
    with rewritten_answers(operator.page) as used:
        operator.open(PAGES[name])
        operator.page.locator("main h1").wait_for()
        assert operator.executed() == []
    assert used


def test_stored_texts_of_every_field_are_shown_as_text(
    operator: Visitor, seeded: Seeded, hostile_tenant: str
) -> None:
    operator.open("/")
    operator.pick(hostile_tenant)
    for route in ("/tenants", f"/tenants/{hostile_tenant}", "/requests", "/audit", "/keys"):
        operator.open(route)
        assert operator.executed() == [], route
    page_text = operator.page.locator("main").inner_text()
    assert sum(text.strip() in page_text for text in TEXTS) >= 50


@pytest.mark.parametrize("template", ["/adapters/{}/{}", "/requests/{}", "/tenants/{}", "/{}"])
def test_addresses_are_shown_as_text(operator: Visitor, template: str) -> None:
    for text in TEXTS[::34]:
        operator.open(template.replace("{}", quote(text, safe="")))
        assert operator.executed() == []


@pytest.mark.parametrize("route", ["/adapters", "/requests", "/audit", "/usage"])
def test_what_a_query_says_is_text(operator: Visitor, route: str) -> None:
    names = ("search", "tenant", "adapter", "action", "actor", "after", "code", "state", "sort")
    for start in (0, 50):
        query = "&".join(
            f"{name}={quote(text)}" for name, text in zip(names, TEXTS[start:], strict=False)
        )
        operator.open(f"{route}?{query}")
        assert operator.executed() == []


@pytest.fixture(scope="module")
def hostile_tenant(seeded: Seeded) -> str:
    """A tenant that has the corpus in its name, its keys' names, and what it asked for."""
    slug = "hostile"
    seeded.change("POST", "/admin/tenants", {"slug": slug, "name": TEXTS[0]})
    seeded.change("PUT", f"/admin/tenants/{slug}/quota", {})
    keys = [
        seeded.change("POST", "/v1/keys", {"name": text, "scopes": ["infer"]}, tenant=slug)
        for text in TEXTS
    ]
    for text in TEXTS:
        seeded.change("PATCH", f"/admin/tenants/{slug}", {"name": text})
    headers = {"authorization": f"Bearer {keys[0]['key']}"}
    with httpx.Client(base_url=seeded.server.url, headers=headers) as asking:
        for text in TEXTS:
            body = {"model": text, "messages": [{"role": "user", "content": text}]}
            assert asking.post("/v1/chat/completions", json=body).status_code >= 400
    return slug


@contextmanager
def rewritten_answers(page: Page) -> Iterator[set[str]]:
    """While it lasts, every text in the API's answers is another of the corpus; those so far."""
    texts, used = cycle(TEXTS), set[str]()

    def rewrite(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: rewrite(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [rewrite(part, key) for part in value]
        if not isinstance(value, str) or key in KEPT or MOMENT.match(value):
            return value
        used.add(text := next(texts))
        return text

    def answer(route: Route) -> None:
        real = route.fetch()
        is_session = urlsplit(route.request.url).path == "/v1/session"
        if is_session or not real.ok:
            route.fulfill(response=real)
        else:
            route.fulfill(response=real, body=json.dumps(rewrite(real.json())))

    page.route(_is_of_the_api, answer)
    try:
        yield used
    finally:
        page.unroute(_is_of_the_api)


def _is_of_the_api(url: str) -> bool:
    return urlsplit(url).path.startswith(("/v1/", "/admin/"))
