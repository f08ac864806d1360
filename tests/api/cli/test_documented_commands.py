"""Every command in the documentation exists, with these options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from loraplex.api import cli
from loraplex.api.cli import serve
from loraplex.api.cli.adapters import app
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.cli.speculation import parse_speculation

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adapters.md"
SPECULATION = ROOT / "docs" / "speculation.md"
MEDUSA, EAGLE = ROOT / "docs" / "medusa.md", ROOT / "docs" / "eagle.md"
QUANTIZE = ROOT / "docs" / "quantize.md"
IDENTITY = ROOT / "docs" / "identity.md"
FLEET = ROOT / "docs" / "fleet.md"


def shown(group: str, *pages: Path) -> list[str]:
    """The options of the commands of a group that these pages show."""
    line = re.compile(rf"^ *(?:\$ )?loraplex {group} (.+)$", flags=re.MULTILINE)
    return [found for page in pages for found in line.findall(page.read_text())]


SHOWN = shown("adapters", PAGE, SPECULATION, ROOT / "README.md")
SERVED = shown("serve", SPECULATION, MEDUSA, EAGLE, QUANTIZE, ROOT / "README.md")
QUANTIZED = [
    line.replace("calibration.txt", str(Path(__file__)))  # it has to be there
    for line in shown("quantize", QUANTIZE, ROOT / "README.md")
]


MANAGING = re.compile(
    r"^ *loraplex ((?:login|whoami|operators|tenants|users|keys|db|audit|fleet)\b[^|\n]*)",
    flags=re.MULTILINE,
)
MANAGED = [
    line
    for page in (IDENTITY, FLEET, ROOT / "README.md")
    for line in MANAGING.findall(page.read_text())
]


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) >= 10
    assert len(MANAGED) >= 5
    assert len(QUANTIZED) == 2


@pytest.mark.parametrize("line", MANAGED)
def test_a_shown_way_to_manage_is_understood(line: str) -> None:
    name, *words = shlex.split(line, comments=True)
    command = cli.load_command(name)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"{line} names no command"
    assert command.make_context(command.name, words).params


@pytest.mark.parametrize("line", SHOWN)
def test_a_shown_command_is_understood(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"{line} names no command"
    context = command.make_context(command.name, words)
    assert context.params


@pytest.mark.parametrize("line", SERVED)
def test_a_shown_way_to_serve_is_understood(line: str) -> None:
    command: Any = typer.main.get_command(serve.app)
    context = command.make_context("serve", shlex.split(line, comments=True))
    assert context.params["model"]
    assert parse_speculation(context.params["speculation"]) or "off" in line


@pytest.mark.parametrize("line", QUANTIZED)
def test_a_shown_way_to_quantize_is_understood(line: str) -> None:
    context = cli.load_command("quantize").make_context("quantize", shlex.split(line))
    assert context.params["text"]


def test_every_quantize_option_is_told_of() -> None:
    text = QUANTIZE.read_text()
    options = {name for part in cli.load_command("quantize").params for name in part.opts}
    assert {name for name in options if name not in text} <= {"--help", "model", "out"}


def test_every_command_is_told_of() -> None:
    text = PAGE.read_text()
    group: Any = typer.main.get_command(app)
    untold = [name for name in group.commands if f"`{name}" not in text and name not in str(SHOWN)]
    assert set(untold) <= {"ls", "list"}


def test_every_exit_code_is_told_of() -> None:
    for code in ExitCode:
        assert f"\n| {code.value} | " in PAGE.read_text()
