"""A pytest plugin: what pytest-xdist runs in one worker."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

CONSOLE = "tests/console"


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one worker, and so do the console's, which share a server that takes
    15 s to fill."""

    def _split_scope(self, nodeid: str) -> str:
        is_console = nodeid.startswith(f"{CONSOLE}/")
        return CONSOLE if is_console else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """For `--dist loadfile`."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None
