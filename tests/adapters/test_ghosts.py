from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.ghosts import Ghosts


def test_the_last_evicted_keys_are_remembered_up_to_the_depth() -> None:
    ghosts: Ghosts[str] = Ghosts(10)
    for key in "abc":
        ghosts.add(key, 4)
    assert [key in ghosts for key in "abc"] == [False, True, True]


def test_a_key_that_is_used_again_counts_once() -> None:
    ghosts: Ghosts[str] = Ghosts(10)
    ghosts.add("a", 4)
    assert ghosts.take("a")
    assert not ghosts.take("a")


def test_without_depth_nothing_is_remembered() -> None:
    ghosts: Ghosts[str] = Ghosts()
    ghosts.add("a", 1)
    assert not ghosts.take("a")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=60), st.integers(4, 12))
def test_ghosts_are_what_a_larger_cache_would_have_kept(
    uses: list[tuple[int, int]], depth: int
) -> None:
    """Against two caches, of which one holds `depth` keys more: a use of a ghost is a use that
    only the larger one serves."""
    ghosts: Ghosts[int] = Ghosts(depth)
    small: list[int] = []
    large: list[int] = []
    for key, _ in uses:
        was_only_in_large = key in large and key not in small
        assert ghosts.take(key) == was_only_in_large
        for cache, size in ((small, 3), (large, 3 + depth)):
            if key in cache:
                cache.remove(key)
            cache.append(key)
            if len(cache) > size:
                evicted = cache.pop(0)
                if cache is small:
                    ghosts.add(evicted, 1)
