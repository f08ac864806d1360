"""Exports of usage are complete, however many pages they are read in."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, cast

from loraplex.api.routes import usage as module
from loraplex.api.routes.pages import MAX_PAGE
from loraplex.platform.usage.repository import Group, UsageQuery, UsageSum

FIRST = date(2026, 3, 1)


def test_csv_continues_until_nothing_is_left() -> None:
    days = [FIRST + timedelta(days=number) for number in range(5)]
    queries: list[UsageQuery] = []

    async def read(query: UsageQuery) -> Sequence[UsageSum]:
        queries.append(query)
        assert query.after is not None
        rest = [day for day in days if day > cast(date, query.after[0])]
        return [sums_of(day) for day in rest[:2]]

    async def export() -> str:
        lines = module._csv_lines(
            UsageQuery((Group.DAY,)), [sums_of(day) for day in days[:2]], read, show
        )
        return "".join([line async for line in lines])

    head, *rows = csv.reader(io.StringIO(asyncio.run(export())))
    assert head[:2] == ["day", "requests"]
    assert [row[0] for row in rows] == [day.isoformat() for day in days]
    assert {query.limit for query in queries} == {MAX_PAGE}


def show(row: UsageSum) -> dict[str, Any]:
    return {"requests": row.num_requests}


def sums_of(day: date) -> UsageSum:
    return UsageSum((day,), 1, 2, 1, 3, 0, 0, 7, 5 * 10**8)
