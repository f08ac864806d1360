"""Markers in text that arrives in pieces."""

from __future__ import annotations


def num_begun(text: str, marker: str) -> int:
    """The number of characters at the end of `text` that may be the beginning of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
