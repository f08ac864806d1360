"""The console's bundle: small, self-contained, and consistent with its content security policy."""

from __future__ import annotations

import gzip
import re
from urllib.parse import urlsplit

import httpx
import pytest

from loraplex.api.http.console_files import BUNDLE
from support.console import PAGES, Visitor
from support.console_policy import POLICY
from support.seeded import Seeded

MAX_FIRST_LOAD = 300_000


def test_the_first_load_is_small(operator: Visitor) -> None:
    """Everything that the overview asks for below /console/, as a browser without a cache."""
    asked: list[str] = []
    operator.page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    operator.open("/")
    paths = {path.removeprefix("/console/") for path in asked if path.startswith("/console/")}
    loaded = [BUNDLE / path for path in paths if (BUNDLE / path).is_file()]
    assert any(file.suffix == ".js" for file in loaded)
    assert any(file.suffix == ".css" for file in loaded)
    sizes = [len(gzip.compress(file.read_bytes(), 6)) for file in loaded]
    index = len(gzip.compress((BUNDLE / "index.html").read_bytes(), 6))
    assert sum(sizes) + index <= MAX_FIRST_LOAD


def test_the_whole_bundle_names_no_other_site_to_load_from() -> None:
    page = (BUNDLE / "index.html").read_text(encoding="utf-8")
    assert all(
        source.startswith("/console/") for source in re.findall(r'(?:src|href)="([^"]+)"', page)
    )
    assert not re.search(r"<style|\sstyle=|<script(?![^>]*\ssrc=)|\son\w+=", page)
    for sheet in BUNDLE.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", sheet.read_text("utf-8")), (
            sheet
        )


@pytest.mark.parametrize("route", [*PAGES.values(), "/sign-in", "/join", "/no/such/page"])
def test_every_page_has_the_policy_and_is_not_kept(seeded: Seeded, route: str) -> None:
    answer = httpx.get(f"{seeded.server.url}/console{route}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    check_headers(answer)
    assert "no-store" in answer.headers["cache-control"]


def test_every_file_has_the_policy_and_is_kept_for_good(seeded: Seeded) -> None:
    for file in (BUNDLE / "assets").iterdir():
        answer = httpx.get(f"{seeded.server.url}/console/assets/{file.name}")
        assert answer.content == file.read_bytes()
        check_headers(answer)
        assert "immutable" in answer.headers["cache-control"]


def test_what_is_no_file_of_the_bundle_is_not_looked_for(seeded: Seeded) -> None:
    """A page's address shows the console; an asset's is refused, under a policy of its own."""
    refused = httpx.get(f"{seeded.server.url}/console/assets/none.js")
    assert refused.status_code == 404
    assert "default-src 'none'" in refused.headers["content-security-policy"]
    for path in ("%2e%2e/%2e%2e/openapi.py", "..%2f..%2fopenapi.py", "assets%2f..%2f..%2fapp.py"):
        answer = httpx.get(f"{seeded.server.url}/console/{path}")
        assert answer.content == (BUNDLE / "index.html").read_bytes() or answer.status_code == 404


def check_headers(answer: httpx.Response) -> None:
    parts = (
        part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert {name: value.strip() for name, value in parts} == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
