"""An error as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data."""

    code: str
    message: str
    retry_after_seconds: float | None = None
    """Seconds until a retry may succeed, if known."""
    is_retryable: bool | None = None
    """Whether the same request may succeed later; None: as published for the code."""
