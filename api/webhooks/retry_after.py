"""Reads `Retry-After` of an answer (RFC 9110, section 10.2.3)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from email.utils import parsedate_to_datetime

STATUSES = frozenset({429, 503})
"""Those whose `Retry-After` says when to repeat the request."""
_HEADER = b"retry-after"
_MAX_DIGITS = 9


def seconds_to_wait(
    status: int, headers: Iterable[tuple[bytes, bytes]], now: datetime
) -> int | None:
    """The seconds from `now` until the receiver wants the next attempt, at least 0.

    None if it does not say, or in a form that is not in the specification.
    """
    values = [value for name, value in headers if name.lower() == _HEADER]
    if status not in STATUSES or len(values) != 1:
        return None
    text = values[0].strip()
    if text.isdigit():
        return int(text) if len(text) <= _MAX_DIGITS else None
    try:
        moment = parsedate_to_datetime(text.decode("ascii"))
        return max(0, round((moment - now).total_seconds()))
    except (ValueError, TypeError, OverflowError):  # TypeError: a date without a zone
        return None
