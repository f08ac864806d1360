"""What each way to install brings, and what the command says without the engine."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.cli import main
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.platform.version import __version__
from support.extras import brought

ROOT = Path(__file__).parents[2]
TEST_PACKAGES = {"pytest", "hypothesis", "moto", "openai", "peft", "mypy", "ruff", "playwright"}


@pytest.fixture(scope="module")
def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(monkeypatch: pytest.MonkeyPatch, command: str) -> int:
    """The exit code of a command where torch cannot be imported."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("sys.argv", ["loraplex", *command.split()])
    return main()


def test_the_core_brings_no_torch_and_no_test_packages(project: Any) -> None:
    names = set(brought(project["dependencies"]))
    assert {"fastapi", "typer", "transformers"} <= names
    assert not names & {"torch", "triton", *TEST_PACKAGES}


def test_the_engine_brings_torch_and_no_test_packages(project: Any) -> None:
    engine = project["optional-dependencies"]["engine"]
    names = set(brought([*project["dependencies"], *engine]))
    assert {"torch", "llguidance"} <= names
    assert not names & TEST_PACKAGES


@pytest.mark.parametrize(
    "command",
    [
        "serve base",
        "agent base --certificates folder",
        "ranks 1 --rank-address 127.0.0.1:1 --rank-secret file",
        "models check base",
        "plan base",
        f"quantize base out --text {__file__}",
        f"drafts train --kind medusa --model base --data {__file__} --out out",
        "bench profile",
    ],
)
def test_a_command_that_needs_torch_says_how_to_install_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command) == ExitCode.FAILED
    message = capsys.readouterr().err
    assert message.startswith("Error: ")
    assert message.endswith(" needs torch: pip install 'loraplex[engine]'\n")


def test_the_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "--version")
    assert capsys.readouterr().out == f"loraplex {__version__}\n"
