"""Reads the limits of a canary from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from .numbers import parse_finite

NAMES = ("error_rate", "refusals", "length", "latency", "judge", "min_requests")


def parse_limits(
    texts: Sequence[str], *, judge: str | None = None, judge_percent: float | None = None
) -> dict[str, Any]:
    """The limits of `NAME=VALUE` and the judge, by name; those that are left out have the server's
    defaults. Raises BadParameter, also for an option that has no effect without a judge."""
    limits: dict[str, Any] = dict(map(_parse, texts))
    if judge is not None:
        limits["judge_model"] = judge
    elif judge_percent is not None:
        raise typer.BadParameter("it needs --judge", param_hint="--judge-percent")
    elif "judge" in limits:
        raise typer.BadParameter("'judge' needs --judge", param_hint="--limit")
    if judge_percent is not None:
        limits["judge_percent"] = judge_percent
    return limits


def _parse(text: str) -> tuple[str, float | None]:
    name, _, value = text.partition("=")
    if name not in NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(NAMES)}", param_hint="--limit")
    if value == "none" and name != "min_requests":
        return name, None
    try:
        return name, int(value) if name == "min_requests" else parse_finite(value)
    except ValueError:
        message = f"{text!r}: the value must be a number, or `none` for no limit"
        raise typer.BadParameter(message, param_hint="--limit") from None
