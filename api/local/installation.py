"""A local installation, managed by `loraplex` commands that are printed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 120.0
OPERATOR = "local"


class StepFailed(Exception):
    """A `loraplex` command failed; the message is its output."""


@dataclass(frozen=True, slots=True)
class TenantAccess:
    """A tenant and a key of it."""

    slug: str
    api_key: str


@dataclass(frozen=True, slots=True)
class Installation:
    """A data folder and its server; `show` is called with each command before it runs."""

    data_dir: Path
    url: str
    show: Callable[[str], None]
    operator_key: str = field(default="", repr=False)
    """The key of the operator who creates tenants; see `with_operator`."""

    def with_operator(self) -> Installation:
        """The same with its first operator, who is created directly in the database."""
        operator_key = self._run("operators", "create", OPERATOR)["key"]
        return replace(self, operator_key=operator_key)

    def create_tenant(self, slug: str) -> TenantAccess:
        """Make a tenant and a key."""
        self._run("tenants", "create", slug, api_key=self.operator_key)
        created = self._run("keys", "create", "--tenant", slug, api_key=self.operator_key)
        return TenantAccess(slug=slug, api_key=created["key"])

    def push(self, tenant: TenantAccess, folder: Path, name: str) -> str:
        """Push an adapter's folder as `name`; returns the version it became, in its pinned form."""
        version: str = self._run("adapters", "push", str(folder), name, api_key=tenant.api_key)[
            "id"
        ]
        return version

    def _run(self, *arguments: str, api_key: str = "") -> Any:
        self.show(shlex.join(["loraplex", *arguments]))
        result = subprocess.run(
            [sys.executable, "-m", "loraplex", *arguments, "--json"],
            env={**os.environ, **self.environment, "LORAPLEX_API_KEY": api_key},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if result.returncode != 0:
            raise StepFailed(f"{shlex.join(arguments)}: {result.stderr.strip()}")
        return json.loads(result.stdout)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the commands, instead of the user's own settings and profiles."""
        return {
            "LORAPLEX_DATA_DIR": str(self.data_dir),
            "LORAPLEX_URL": self.url,
            "LORAPLEX_PROFILE": "",
            "LORAPLEX_TENANT": "",
            "XDG_CONFIG_HOME": str(self.data_dir / "config"),
        }
