"""What a load of a base shows of its progress."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from loraplex.engine.checkpoint.load_progress import LINE_SECONDS, report_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: time[0])
    return time


def test_a_terminal_shows_a_bar_until_the_stage_ends(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with report_progress("packing projections", 3) as advance:
        advance()
        assert terminal.getvalue() == ""  # a stage that takes no time shows nothing
        now[0] += 1
        advance()
        assert f"packing projections [{'#' * 20}{'.' * 10}] 2/3" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")


def test_elsewhere_a_long_stage_logs_a_line_now_and_then(
    now: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO), report_progress("reading weights", 100) as advance:
        for _ in range(100):
            now[0] += LINE_SECONDS / 40
            advance()
    lines = [record.__dict__ for record in caplog.records]
    assert [line["num_done"] for line in lines] == [40, 80]
    assert {(line["stage"], line["total"]) for line in lines} == {("reading weights", 100)}
