"""The version is in one place, and the changelog has it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from loraplex.platform.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_changelog_begins_with_the_version() -> None:
    heading = next(
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line[:3] == "## "
    )
    assert re.fullmatch(rf"## {re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading)


def test_make_reads_the_version_from_where_the_package_has_it() -> None:
    printed = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "image"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"--tag loraplex:{__version__}-cpu" in printed


def test_the_documents_of_a_release_name_files_that_exist() -> None:
    for page in ("SECURITY.md", "docs/upgrading.md", "docs/changing-the-base.md"):
        text = (ROOT / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
