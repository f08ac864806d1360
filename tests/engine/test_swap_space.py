from __future__ import annotations

import pytest

from loraplex.engine.kv.swap_space import SwapSpace


def test_every_slot_has_one_holder_and_comes_back() -> None:
    space = SwapSpace(4)
    first, second = space.take(3), space.take(1)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    assert space.num_free == 0
    space.check_integrity([*first, *second])
    space.give_back(first)
    assert space.num_free == 3
    space.check_integrity(second)


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1]])
def test_a_leaked_or_doubly_held_slot_is_found(held: list[int]) -> None:
    space = SwapSpace(4)
    assert space.take(1) == [0]
    with pytest.raises(AssertionError, match="of 4"):
        space.check_integrity(held)
