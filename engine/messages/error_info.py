"""An error as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data."""

    code: str
    message: str
    retry_after_seconds: float | None = None
    """When it is worth another try, where that is known."""
    is_retryable: bool | None = None
    """Whether the same request may succeed later; None: as it is published of the code."""
