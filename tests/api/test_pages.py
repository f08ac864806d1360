"""Paging of lists."""

from __future__ import annotations

from loraplex.api.routes.pages import PageRequest

ROWS = ["a", "b", "c", "d", "e"]


def read(page: PageRequest) -> list[str]:
    """The rows as a service reads them."""
    behind = [row for row in ROWS if page.after is None or row > page.after]
    return behind[: page.num_rows]


def test_pages_give_every_row_once_and_then_end() -> None:
    for limit in range(1, 7):
        seen: list[str] = []
        after, has_more = None, True
        while has_more:
            page = PageRequest(after, limit)
            answer = page.answer(read(page), view=str.upper, cursor=lambda row: row)
            assert 1 <= len(answer.data) <= limit
            seen += answer.data
            after, has_more = answer.next_after, answer.has_more
            assert (after is not None) == has_more
        assert seen == ["A", "B", "C", "D", "E"]


def test_a_list_without_rows_is_one_empty_page() -> None:
    answer = PageRequest(None, 3).answer([], view=str, cursor=str)
    assert (answer.data, answer.has_more, answer.next_after) == ([], False, None)
