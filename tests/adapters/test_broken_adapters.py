"""Adapters with typical defects: served, or refused with the correct code and pointer.

They are examined in this process. `tests/api/cli/test_validate.py` has one of each outcome examined
in the process of a push, and `make adapter-evidence` all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.intake import examine_request
from loraplex.adapters.rejections import REJECTIONS
from support.broken import check_broken
from support.broken_adapters import BROKEN, SERVED


def test_there_are_enough_kinds_of_both_outcomes() -> None:
    assert len(BROKEN) >= 20
    expected = [kind.expected for kind in BROKEN.values()]
    assert expected.count(SERVED) >= 5
    assert set(expected) - {SERVED} <= REJECTIONS.keys()


@pytest.mark.parametrize("name", BROKEN)
def test_is_served_as_by_peft_or_refused_for_its_reason(name: str, tiny_base: Path) -> None:
    assert check_broken(tiny_base, BROKEN[name], examine_request) == ""
