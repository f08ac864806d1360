"""A pytest plugin: which tests pytest-xdist runs in the same worker."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

CONSOLE = "tests/console"


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist ships no types
    """Runs the tests of a file in the same worker, and those of all console files.

    The console's tests share a server with sample data. Creating it in each of three workers made
    these tests take 240 s of the workers' time instead of 175.
    """

    def _split_scope(self, nodeid: str) -> str:
        is_console = nodeid.startswith(f"{CONSOLE}/")
        return CONSOLE if is_console else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """For `--dist loadfile`."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None
