"""The limits of open files and connections of this process."""

from __future__ import annotations

import resource
from contextlib import suppress

MOST_OPEN_FILES = 1 << 20
"""More are not asked for: the system may offer any number."""


def raise_open_files() -> int:
    """Let this process, and those it starts, open as many as the system allows; how many those are.

    Shells and systemd begin programs with 1,024, for the sake of those that use `select`, and leave
    it to the others to ask for more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_number(hard), MOST_OPEN_FILES)
    if _number(soft) < wanted:
        with suppress(ValueError, OSError):  # macOS has its own bound below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(_number(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), MOST_OPEN_FILES)


def _number(limit: int) -> int:
    return MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else limit
