"""Paging: `?after=&limit=` of a request, `has_more` and `next_after` of the response.

A cursor is the key of a row, so rows that are added or removed between two pages do not shift the
others. A route requests one row more than the page has:

    rows = service.list_keys(session, after=page.after, limit=page.num_rows)
    return json_response(page.answer(rows, view=key_view, cursor=lambda key: key.id))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, TypeVar

from fastapi import Depends, Query

from ..schemas.adapters import PageView

DEFAULT_PAGE = 100
MAX_PAGE = 500
MAX_CURSOR_LENGTH = 256

Row = TypeVar("Row")
View = TypeVar("View")


class PageRequest(NamedTuple):
    """Which part of a list is asked for."""

    after: str | None
    """The cursor of the last row that the caller has; None: from the beginning."""
    limit: int

    @property
    def num_rows(self) -> int:
        """The number of rows to read: one more than the page has shows that more exist."""
        return self.limit + 1

    def answer(
        self,
        rows: Sequence[Row],
        *,
        view: Callable[[Row], View],
        cursor: Callable[[Row], str],
    ) -> PageView[View]:
        """The page of `rows`, which are up to `num_rows` after `after`."""
        shown = rows[: self.limit]
        has_more = len(rows) > self.limit
        next_after = cursor(shown[-1]) if has_more else None
        return PageView([view(row) for row in shown], has_more, next_after)


async def read_page(
    after: Annotated[
        str | None,
        Query(max_length=MAX_CURSOR_LENGTH, description="`next_after` of the previous page."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
) -> PageRequest:
    """The page that the query asks for."""
    return PageRequest(after, limit)


Page = Annotated[PageRequest, Depends(read_page)]
