"""`Retry-After` in both of its forms, and what is neither."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from loraplex.api.webhooks.retry_after import seconds_to_wait

NOW = datetime(2026, 11, 29, 10, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "value", "expected"),
    [
        (503, b"120", 120),
        (429, b" 0 ", 0),
        (503, b"Sun, 29 Nov 2026 10:05:00 GMT", 300),
        (503, b"Sun, 29 Nov 2026 09:00:00 GMT", 0),
        (503, b"Sun, 29 Nov 2026 12:05:00 +0200", 300),
        (503, b"Sun, 29 Nov 2026 10:05:00 -0000", None),
        (503, b"Sun, 29 Nov 99999 10:05:00 GMT", None),
        (503, b"-5", None),
        (503, b"1.5", None),
        (503, b"9" * 400, None),
        (503, "\u0661\u0662".encode(), None),
        (503, b"soon", None),
        (503, b"", None),
        (500, b"120", None),
        (200, b"120", None),
    ],
)
def test_the_time_that_a_receiver_wants_is_read(
    status: int, value: bytes, expected: int | None
) -> None:
    headers = [(b"Date", b"x"), (b"Retry-After", value)]
    assert seconds_to_wait(status, headers, NOW) == expected


def test_nothing_is_wanted_without_the_header_or_with_two() -> None:
    assert seconds_to_wait(503, [(b"date", b"x")], NOW) is None
    assert seconds_to_wait(503, [(b"retry-after", b"1"), (b"retry-after", b"9")], NOW) is None
