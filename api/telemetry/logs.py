"""Logging of the API process: one JSON object per line on standard error, as in the engine.

An event has a stable name and facts (`request_id`, `tenant_id`, `adapter_digest`). Prompts, answers
and keys are never logged.
"""

from __future__ import annotations

import logging

import structlog

from ...adapters.logs import log_to_stderr


def configure_logging() -> None:
    """Send structlog's events through the standard library's records, and all to stderr."""
    log_to_stderr()
    for chatty in ("uvicorn", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
