"""The commands that the documentation shows: each is one, with these options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from loraplex.api.cli.adapters import app
from loraplex.api.cli.exit_codes import ExitCode

PAGE = Path(__file__).parents[3] / "docs" / "adapters.md"
SHOWN = re.findall(r"^(?:\$ )?loraplex adapters (.+)$", PAGE.read_text(), flags=re.MULTILINE)


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) >= 10


@pytest.mark.parametrize("line", SHOWN)
def test_a_shown_command_is_understood(line: str) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"{line} names no command"
    context = command.make_context(command.name, words)
    assert context.params


def test_every_command_is_told_of() -> None:
    text = PAGE.read_text()
    group: Any = typer.main.get_command(app)
    untold = [name for name in group.commands if f"`{name}" not in text and name not in str(SHOWN)]
    assert set(untold) <= {"ls"}


def test_every_exit_code_is_told_of() -> None:
    for code in ExitCode:
        assert f"\n| {code.value} | " in PAGE.read_text()
