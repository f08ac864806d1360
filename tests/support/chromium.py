"""A headless Chromium for the console's tests: the system's, never downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb")
"""Containers give neither namespaces to root nor a large /dev/shm; pictures look alike anywhere."""
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


def find_chromium() -> str | None:
    """The browser's program: `LORAPLEX_CHROMIUM`, or the first of `NAMES` on the path."""
    named = os.environ.get("LORAPLEX_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """The browser, until the block is left. Needs `find_chromium()` to find it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()
