"""Pictures of the console over the seeded server: `python -m support.screenshots FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser

from support.chromium import find_chromium, running_chromium
from support.console import PAGES, Visitor, enrol, invite_operator, visiting
from support.seeded import Seeded, seeded_server


def main(folder: Path) -> None:
    """Write each page as `console-<page>.png` and `console-<page>-dark.png`."""
    if find_chromium() is None:
        raise SystemExit("There is no Chromium: CONTRIBUTING.md says how to get one.")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory() as data_dir,
        seeded_server(Path(data_dir) / "data") as seeded,
        running_chromium() as browser,
    ):
        for is_dark in (False, True):
            _take_all(browser, seeded, folder, is_dark)


def _take_all(browser: Browser, seeded: Seeded, folder: Path, is_dark: bool) -> None:
    suffix = "-dark" if is_dark else ""
    with visiting(browser, seeded.server.url, dark=is_dark) as visitor:
        enrol(visitor.page.context, seeded.server.url, invite_operator(seeded))
        for name, route in PAGES.items():
            visitor.open(route)
            if name == "playground":
                _ask(visitor)
            visitor.page.screenshot(path=folder / f"console-{name}{suffix}.png")


def _ask(visitor: Visitor) -> None:
    """Nothing is asked until the page is there; what comes back is part of the picture."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
