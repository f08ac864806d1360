"""What `loraplex fleet up` refuses before it asks Ray for anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from loraplex.api.cli.agent_options import agent_options
from loraplex.api.cli.exit_codes import CommandFailed, ExitCode
from loraplex.api.cli.fleet import app
from loraplex.api.cli.fleet_ray import agent_context

UP = ("up", "--replicas", "2", "--certificates", "fleet")
AGENT = ("--model", "base", "--quantize", "int8")


def refusal(options: Sequence[str]) -> str:
    """The message; fails unless the command line is said to be wrong."""
    ended = CliRunner().invoke(app, [*UP, *options])
    if isinstance(ended.exception, CommandFailed):
        assert ended.exception.exit_code == ExitCode.USAGE
        return str(ended.exception)
    assert ended.exit_code == ExitCode.USAGE
    return ended.output


@pytest.mark.parametrize(
    "options",
    [
        ("--min", "1", *AGENT),
        ("--min", "3", "--max", "4", *AGENT),
        ("--min", "1", "--max", "1", *AGENT),
    ],
)
def test_autoscaling_needs_both_limits_around_the_number(options: tuple[str, ...]) -> None:
    assert "--min and --max" in refusal(options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--quantize", "int8"), "--model"),
        ((*AGENT, "--no-such-option"), "--no-such-option"),
        ((*AGENT, "--quantize", "int3"), "int3"),
        ((*AGENT, "--listen", "0.0.0.0:7070"), "--listen"),
        ((*AGENT, "--data-dir=/data"), "--data-dir"),
        ((*AGENT, "--role", "decode"), "--role"),
        ((*AGENT, "--num-cpus", "0"), "--num-cpus"),
    ],
)
def test_options_that_no_node_could_use_are_refused_at_once(
    options: tuple[str, ...], named: str
) -> None:
    assert named in refusal(options)


def test_variables_and_the_file_are_read_here_and_not_on_the_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loraplex.yaml").write_text("model: base\nmax-num-seqs: 8\nport: 8001\n")
    monkeypatch.setenv("LORAPLEX_CONFIG", str(tmp_path / "loraplex.yaml"))
    monkeypatch.setenv("LORAPLEX_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("LORAPLEX_DATA_DIR", "/data")
    found = agent_options(agent_context(("--quantize", "int8"), Path("fleet")))
    assert set(found) >= {"--model", "base", "--max-num-seqs", "9", "--quantize", "int8"}
    assert not set(found) & {"--config", "--data-dir", "--certificates", "--port"}


def test_the_missing_extra_is_named() -> None:
    with patch("loraplex.api.cli.fleet_ray.find_spec", return_value=None):
        ended = CliRunner().invoke(app, [*UP, *AGENT])
    assert isinstance(ended.exception, CommandFailed)
    assert "loraplex[ray]" in str(ended.exception)
