"""Logging of a process on standard error: one JSON object per line, or one line for people.

The message is a stable event name, and facts are in `extra`. Prompts, outputs and keys are never
logged. Child processes inherit the level and the format as environment variables.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

LEVEL_VARIABLE = "LORAPLEX_LOG_LEVEL"
FORMAT_VARIABLE = "LORAPLEX_LOG_FORMAT"
LOG_VARIABLES = frozenset({LEVEL_VARIABLE, FORMAT_VARIABLE})
TEXT = "text"
"""The value of the variable for `TextFormatter`; all others are for `JsonFormatter`."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One line: time (UTC), level, logger, event, the record's own facts, the traceback."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Time (local), level, event and the record's own facts on a line; then the traceback."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = (f"{key}={_shown(value)}" for key, value in _facts(record).items())
        event = _printable(record.getMessage())
        line = " ".join([f"{moment} {record.levelname:<7} {event}", *facts])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def log_to_stderr() -> None:
    """Send every record of this process, warnings included, to standard error, in the level and
    format of the environment."""
    handler = logging.StreamHandler()
    is_text = os.environ.get(FORMAT_VARIABLE) == TEXT
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    level = os.environ.get(LEVEL_VARIABLE, "info").upper()
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _shown(value: object) -> str:
    """The value as one word, or in quotes."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_word = text.isprintable() and text and not set(text) & {" ", '"', "="}
    return text if is_word or not isinstance(value, str) else json.dumps(text)


def _printable(text: str) -> str:
    # Facts and warnings may hold other people's text: nothing in them may steer the terminal.
    return "".join(each if each.isprintable() or each == "\n" else "�" for each in text)
