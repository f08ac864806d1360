"""Tables of commands: folded in a terminal, and one line a row elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.api import cli
from loraplex.api.cli.output import print_rows
from support.server import Caller, ServerUnderTest

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
ROWS: list[dict[str, str | None]] = [
    {"name": "support-bot", "digest": DIGEST, "reason": "a reason of several words, " * 4},
    {"name": "b", "digest": None, "reason": None},
]
COLUMNS = ["name", "digest", "reason"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a function with a terminal of some columns; returns the lines."""

    def show(run: Callable[[], object], *, width: int = 80) -> list[str]:
        screen = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout", screen)
        run()
        return screen.getvalue().splitlines()

    return show


def test_a_pipe_gets_every_row_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS, COLUMNS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert DIGEST in lines[1]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_all_words_within_its_width(
    terminal: Callable[..., list[str]], width: int
) -> None:
    lines = terminal(lambda: print_rows(ROWS, COLUMNS), width=width)
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("support-bot  ")
    assert sum(line.count("several") for line in lines) == 4
    assert lines[-1].split() == ["b", "-", "-"]


def test_a_digest_is_shortened_where_there_is_no_room(terminal: Callable[..., list[str]]) -> None:
    rows = [{"name": "bot", "digest": DIGEST}]
    assert terminal(lambda: print_rows(rows, ["name", "digest"]), width=100)[1].endswith(DIGEST)
    narrow = terminal(lambda: print_rows(rows, ["name", "digest"]), width=60)
    assert narrow[1] == f"bot   {DIGEST[:19]}"


def test_a_table_without_rows_is_its_columns(terminal: Callable[..., list[str]]) -> None:
    assert terminal(lambda: print_rows([], COLUMNS)) == ["name  digest  reason"]


@pytest.mark.parametrize("caller", ["operator", "tenant"])
def test_the_tables_of_commands_fit_80_columns(
    server: ServerUnderTest,
    resident: Caller,
    terminal: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caller: str,
) -> None:
    key = resident.key
    if caller == "operator":
        key = server.make_operator("table-reader")
    monkeypatch.setenv("LORAPLEX_URL", server.url)
    monkeypatch.setenv("LORAPLEX_API_KEY", key)
    tenants = "adapters list|adapters show bot|adapters versions bot|adapters uploads|keys list|"
    tenants += "usage|usage --resources|quotas show|budgets list|requests list|whoami|"
    tenants += "adapters alias history bot prod"
    operators = (
        "tenants list|operators list|audit list --platform|usage --all-tenants|"
        "usage --all-tenants --resources|whoami|fleet status|prices list"
    )
    for command in (operators if caller == "operator" else tenants).split("|"):
        lines = terminal(lambda words=command: run(words.split()))
        assert lines, command
        assert max(map(len, lines)) <= 80, command


def run(words: list[str]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["loraplex", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code, words
