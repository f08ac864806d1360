"""Logging of the API process: on standard error, as in the engine.

An event has a stable name and facts (`request_id`, `tenant_id`, `adapter_digest`). Prompts, answers
and keys are never logged.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog

from ...adapters.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, log_to_stderr
from ..log_options import LogFormat, LogLevel


def configure_logging(
    level: LogLevel = LogLevel.INFO, log_format: LogFormat = LogFormat.AUTO
) -> None:
    """Send structlog's events through the standard library's records, and all to stderr. Child
    processes of this one log in the same way."""
    if log_format is LogFormat.AUTO:
        log_format = LogFormat.TEXT if sys.stderr.isatty() else LogFormat.JSON
    os.environ.update({LEVEL_VARIABLE: level, FORMAT_VARIABLE: log_format})
    log_to_stderr()
    for chatty in ("uvicorn", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It warns of each malformed form, which is the caller's mistake.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
