"""The options of the log."""

from __future__ import annotations

from enum import StrEnum


class LogLevel(StrEnum):
    """The least severe messages that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a message is written."""

    AUTO = "auto"
    """As text if standard error is a terminal, else as JSON."""
    TEXT = "text"
    JSON = "json"
