"""Moves the store's credentials from this process's environment to the fetcher's.

Afterwards child processes do not inherit them and `os.environ` does not contain them. On Linux and
macOS the bytes themselves are overwritten, so `/proc/<pid>/environ` no longer shows them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

from .logs import LOG_VARIABLES

ZEROED_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0",
    "PYTHONMALLOC": "malloc",
}
"""Makes glibc overwrite all freed memory: the SDK and its HTTP client copy adapters through buffers
that cannot be zeroed otherwise (decision 35)."""
_PREFIX = "AWS_"
_VARIABLES = frozenset({"BOTO_CONFIG"})


_PASSED_VARIABLES = (
    frozenset(
        (
            *("PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
            *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
            *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "PYTHONDONTWRITEBYTECODE"),
        )
    )
    | LOG_VARIABLES
)


def take_credentials() -> dict[str, str]:
    """Remove the AWS SDK's variables from the environment and return them."""
    names = [name for name in os.environ if name.startswith(_PREFIX) or name in _VARIABLES]
    taken = {}
    for name in names:
        taken[name] = os.environ[name]
        _overwrite(name)
        del os.environ[name]
    return taken


def fetcher_environment(
    environment: Mapping[str, str], credentials: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables that a fetcher process needs, and the store's credentials."""
    passed = {
        name: value
        for name, value in environment.items()
        if name in _PASSED_VARIABLES or name.startswith("LC_")
    }
    import_path = os.pathsep.join(filter(None, sys.path))
    return {**passed, **credentials, **ZEROED_MEMORY, "PYTHONPATH": import_path}


def _overwrite(name: str) -> None:
    """Blank the value where the system keeps it: deleting a variable only drops the pointer."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address = getenv(os.fsencode(name))
    if address:
        ctypes.memset(address, 0, len(os.fsencode(os.environ[name])))
