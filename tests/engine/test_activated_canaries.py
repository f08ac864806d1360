"""Canaries that share their contexts: one block of another is visible in an answer."""

from __future__ import annotations

import pytest

from loraplex.engine.kv.prefix_cache import CacheNamespace
from support.canaries import run_canaries
from support.kv_canaries import ACTIVATED


@pytest.mark.slow
def test_activated_adapters_and_the_base_share_no_more_than_what_is_before_the_invocation() -> None:
    found = run_canaries(150, seed=0, canaries=ACTIVATED)
    assert found["foreign"] == 0
    assert found["evictions"] > 0


@pytest.mark.slow
def test_a_block_of_the_base_with_an_invocation_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_block = CacheNamespace.of_block

    def crossed(namespace: CacheNamespace, end: int) -> CacheNamespace:
        return of_block(namespace, 0)

    monkeypatch.setattr(CacheNamespace, "of_block", crossed)
    assert run_canaries(150, seed=0, canaries=ACTIVATED)["foreign"] > 0
