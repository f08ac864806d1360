"""The two formats of the log."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from loraplex.adapters.logs import JsonFormatter, TextFormatter


def record_of(event: str, **facts: Any) -> logging.LogRecord:
    return logging.getLogger("loraplex.test").makeRecord(
        "loraplex.test", logging.WARNING, __file__, 1, event, (), None, extra=facts
    )


def test_an_event_is_a_json_object_with_its_facts() -> None:
    line = json.loads(JsonFormatter().format(record_of("adapter_loaded", tier="host", count=3)))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "loraplex.test",
        "event": "adapter_loaded",
        "tier": "host",
        "count": 3,
    }


def test_an_event_is_a_line_for_people_with_its_facts() -> None:
    record = record_of("adapter_loaded", tier="host", count=3, missing={}, reason="no room")
    moment, rest = TextFormatter().format(record).split(" ", 1)
    assert len(moment) == len("17:00:00")
    assert rest == 'WARNING adapter_loaded tier=host count=3 missing={} reason="no room"'


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "a\nb", "a\u202eb", ""])
def test_a_fact_cannot_steer_the_terminal_or_begin_a_line(text: str) -> None:
    assert TextFormatter().format(record_of("event", adapter=text)).isprintable()
    assert "\x1b" not in TextFormatter().format(record_of(text))


def test_a_traceback_follows_the_line() -> None:
    record = record_of("step_failed")
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    lines = TextFormatter().format(record).splitlines()
    assert lines[0].endswith("step_failed")
    assert lines[-1] == "ValueError: why"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ['"info"', '"error"']),
        ({"LORAPLEX_LOG_LEVEL": "error"}, ['"error"']),
        (
            {"LORAPLEX_LOG_LEVEL": "debug", "LORAPLEX_LOG_FORMAT": "text"},
            ["DEBUG", "INFO", "ERROR"],
        ),
    ],
)
def test_a_process_logs_as_its_environment_says(
    variables: dict[str, str], expected: list[str]
) -> None:
    code = (
        "import logging; from loraplex.adapters.logs import log_to_stderr; log_to_stderr()\n"
        "for level in ('debug', 'info', 'error'): getattr(logging, level)('an_event')"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ended.stderr.splitlines()
    assert len(lines) == len(expected)
    for line, level in zip(lines, expected, strict=True):
        assert level in line
