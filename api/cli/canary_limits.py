"""Reads the limits of a canary from the command line."""

from __future__ import annotations

from collections.abc import Sequence

import typer

NAMES = ("error_rate", "refusals", "length", "latency", "judge", "min_requests")


def parse_limits(texts: Sequence[str]) -> dict[str, float | None]:
    """The limits of `NAME=VALUE`, by name; those that are left out have the server's defaults."""
    return dict(map(_parse, texts))


def _parse(text: str) -> tuple[str, float | None]:
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(NAMES)}", param_hint="--limit")
    if value == "none" and name != "min_requests":
        return name, None
    try:
        return name, int(value) if name == "min_requests" else float(value)
    except ValueError:
        message = f"{text!r}: the value must be a number, or `none` for no limit"
        raise typer.BadParameter(message, param_hint="--limit") from None
