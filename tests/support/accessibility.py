"""Runs axe-core on an open page."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

AXE = Path(__file__).parents[1] / "console" / "axe-core" / "axe.min.js"
GRAVE = frozenset({"serious", "critical"})
COLORS = ["color-contrast", "link-in-text-block"]
"""The rules that a page in other colours may break anew."""
STANDARDS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def grave_violations(page: Page, rules: list[str] = STANDARDS) -> list[str]:
    """Each rule that is broken gravely, of these or of these tags, with the elements that break it.

    The script comes in over the debugger, so the page's own policy stays as it is.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    run = "rules => axe.run({runOnly: rules, resultTypes: ['violations']})"
    found = page.evaluate(run, rules)["violations"]
    return [
        f"{violation['id']}: {violation['help']}: {node['html'][:160]}"
        for violation in found
        if violation["impact"] in GRAVE
        for node in violation["nodes"]
    ]
