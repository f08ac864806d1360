"""A browser, the seeded server, and signed-in users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from support.chromium import find_chromium, running_chromium
from support.console import Visitor, enrol, invite_operator, invite_user, visiting
from support.seeded import Seeded, seeded_server
from support.tools import need

OWNER = "owner@acme.example"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of the module, not of the session: while it runs, this thread has a running event loop."""
    need(find_chromium() is not None, "no Chromium (Debian: chromium; or set LORAPLEX_CHROMIUM)")
    with running_chromium() as running:
        yield running


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    """The demo's server, with three tenants and what they did."""
    with seeded_server(tmp_path_factory.mktemp("console") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def operator(browser: Browser, seeded: Seeded) -> Iterator[Visitor]:
    """An administrator of the platform."""
    with visiting(browser, seeded.server.url) as visitor:
        enrol(visitor.page.context, seeded.server.url, invite_operator(seeded))
        yield visitor


@pytest.fixture(scope="module")
def owner(browser: Browser, seeded: Seeded) -> Iterator[Visitor]:
    """The owner of the tenant `acme`, who is nobody elsewhere."""
    with visiting(browser, seeded.server.url) as visitor:
        enrol(visitor.page.context, seeded.server.url, invite_user(seeded, "acme", OWNER))
        yield visitor
