"""The roles of an agent that cannot be served are refused before anything is loaded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from loraplex.api.cli.agent import app
from loraplex.api.cli.exit_codes import CommandFailed

AGENT = ("--model", "base", "--certificates", "fleet")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--role", "decode"), "needs --host-gib or --swap-gib"),
        (("--role", "decode", "--swap-gib", "1", "--tensor-parallel-size", "2"), "tensor-parallel"),
        (("--role", "prefill", "--pipeline-parallel-size", "2"), "pipeline-parallel"),
        (("--role", "prefill", "--kv-policy", "h2o:64"), "h2o"),
    ],
)
def test_a_role_without_what_it_needs_is_refused(options: tuple[str, ...], reason: str) -> None:
    ended = CliRunner().invoke(app, [*AGENT, *options])
    assert isinstance(ended.exception, CommandFailed)
    assert "--role" in str(ended.exception)
    assert reason in str(ended.exception)
