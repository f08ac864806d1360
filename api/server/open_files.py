"""The limits of open files and connections of this process."""

from __future__ import annotations

import resource
from contextlib import suppress

MOST_OPEN_FILES = 1 << 20
"""The maximum that is requested, because the system may allow any number."""


def raise_open_files() -> int:
    """Raise the limit of open files to the system's maximum and return it; child processes inherit
    it.

    Shells and systemd start programs with 1,024 for the sake of programs that use `select`; other
    programs raise the limit themselves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_number(hard), MOST_OPEN_FILES)
    if _number(soft) < wanted:
        with suppress(ValueError, OSError):  # macOS has its own bound below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(_number(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), MOST_OPEN_FILES)


def _number(limit: int) -> int:
    return MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else limit
