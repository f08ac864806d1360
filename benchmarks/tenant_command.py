"""The command line of a tenant on a local installation."""

from __future__ import annotations

import os
import subprocess
import sys
from subprocess import CompletedProcess

from loraplex.api.local.installation import Installation, TenantAccess

SECONDS = 1_800.0


class TenantCommand:
    """`loraplex`, with the key of a tenant."""

    def __init__(self, installation: Installation, tenant: TenantAccess) -> None:
        self._environment = {**installation.environment, "LORAPLEX_API_KEY": tenant.api_key}

    def run(self, *arguments: str) -> CompletedProcess[str]:
        """The command's result, whatever its exit status."""
        print(f"loraplex {' '.join(arguments)}", file=sys.stderr, flush=True)
        return subprocess.run(
            [sys.executable, "-m", "loraplex", *arguments],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def succeed(self, *arguments: str) -> str:
        """What the command prints. Raises AssertionError if it fails."""
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout
