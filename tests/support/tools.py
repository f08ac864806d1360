"""Programs that tests need and pip does not install: proxies, browsers, kubectl."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def need_program(*names: str, package: str) -> str:
    """The path of the first of `names` that is installed.

    Without one the test is skipped, and says which Debian package has it. Under CI (the variable
    `CI` is set) it fails instead: what is skipped there is never tested.
    """
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        _give_up(f"{names[0]} is not installed (Debian: {package})")
    return found


def need(condition: bool, reason: str) -> None:
    """Skip the test, or fail it under CI, unless `condition` holds."""
    if not condition:
        _give_up(reason)


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI must have it")
    pytest.skip(reason)
