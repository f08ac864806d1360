"""Taking the store's credentials out of this process's environment.

What is taken is neither inherited by children nor found in `os.environ` again. On Linux and macOS
the bytes themselves are overwritten too, so `/proc/<pid>/environ` shows them no longer.
"""

from __future__ import annotations

import ctypes
import os

_PREFIX = "AWS_"
_VARIABLES = frozenset({"BOTO_CONFIG"})


def take_credentials() -> dict[str, str]:
    """The AWS SDK's variables, which are gone from the environment afterwards."""
    names = [name for name in os.environ if name.startswith(_PREFIX) or name in _VARIABLES]
    taken = {}
    for name in names:
        taken[name] = os.environ[name]
        _overwrite(name)
        del os.environ[name]
    return taken


def _overwrite(name: str) -> None:
    """Blank the value where the system keeps it: deleting a variable only drops the pointer."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address = getenv(os.fsencode(name))
    if address:
        ctypes.memset(address, 0, len(os.fsencode(os.environ[name])))
