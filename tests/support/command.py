"""Runs the command line in this process, as a tenant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.api.cli import main
from support.server import Caller


class Command:
    """Runs `loraplex adapters …`, or another group of commands, as a caller."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        caller: Caller,
        group: str = "adapters",
    ) -> None:
        self._group = group
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.setenv("LORAPLEX_URL", caller.url)
        monkeypatch.setenv("LORAPLEX_API_KEY", caller.key)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self._monkeypatch.setattr("sys.argv", ["loraplex", self._group, *arguments])
        try:
            code = main()
        except SystemExit as exc:
            code = int(exc.code or 0)
        output = self._capsys.readouterr()
        return code, output.out, output.err

    def ask(self, *arguments: str) -> Any:
        """What `--json` prints of a command that succeeds."""
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)
