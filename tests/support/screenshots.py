"""Screenshots of the console with the seeded server: `python -m support.screenshots FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser

from loraplex.api.demo.task import held_out_requests
from support.chromium import find_chromium, running_chromium
from support.console import PAGES, Visitor, enrol, invite_operator, visiting
from support.past_hour import write_past_hour
from support.seeded import Seeded, seeded_server

OF_A_TENANT = frozenset({"fine-tuning", "users", "keys", "webhooks", "playground", "audit"})


def main(folder: Path) -> None:
    """Write each page as `console-<page>.png` and `console-<page>-dark.png`."""
    if find_chromium() is None:
        raise SystemExit("There is no Chromium: CONTRIBUTING.md says how to get one.")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="loraplex-demo-") as data_dir,
        seeded_server(Path(data_dir) / "data") as seeded,
        running_chromium() as browser,
    ):
        write_past_hour(seeded)
        for is_dark in (False, True):
            _take_all(browser, seeded, folder, is_dark)


def _take_all(browser: Browser, seeded: Seeded, folder: Path, is_dark: bool) -> None:
    suffix = "-dark" if is_dark else ""
    with visiting(browser, seeded.server.url, dark=is_dark) as visitor:
        enrol(visitor.page.context, seeded.server.url, invite_operator(seeded))
        for name, route in PAGES.items():
            visitor.open(route)
            visitor.pick("acme" if name in OF_A_TENANT else None)
            visitor.open(route)
            if name == "playground":
                _ask(visitor)
            visitor.page.wait_for_load_state("networkidle")
            visitor.page.screenshot(path=folder / f"console-{name}{suffix}.png")


def _ask(visitor: Visitor) -> None:
    """Put one request to an adapter and to its base."""
    page = visitor.page
    page.get_by_role("button", name="Side by side").click()
    page.get_by_label("Model", exact=True).fill("sql")
    page.get_by_label("Prompt", exact=True).fill(held_out_requests(1)[0].prompt)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="trace").nth(1).wait_for()
    visitor.settle()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
