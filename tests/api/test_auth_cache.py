"""The cache of principals by key."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from loraplex.api.control_plane import auth_cache
from loraplex.api.control_plane.auth_cache import (
    MAX_STALE_SECONDS,
    TTL_SECONDS,
    AuthCache,
    is_current,
)
from loraplex.platform.base import utc_now
from loraplex.platform.keys.principal import AnyPrincipal, OperatorPrincipal, OperatorRole

REVOCATION_SECONDS = 5.0
"""What is promised: a revoked key is refused everywhere after so long."""
ROOT = OperatorPrincipal("id", "root", OperatorRole.ADMIN)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def remember(
    cache: AuthCache, token: str, slug: str | None = None, principal: AnyPrincipal = ROOT
) -> None:
    cache.put(token, slug, principal, cache.begin())


def test_what_was_looked_up_is_known_until_it_is_old() -> None:
    clock = Clock()
    cache = AuthCache(clock=clock)
    remember(cache, "a")
    clock.now += TTL_SECONDS
    assert cache.get("a", None) is ROOT
    clock.now += 0.001
    assert cache.get("a", None) is None
    assert TTL_SECONDS < REVOCATION_SECONDS


def test_its_age_counts_from_before_the_look_up() -> None:
    clock = Clock()
    cache = AuthCache(clock=clock)
    ticket = cache.begin()
    clock.now += 2  # a slow database
    cache.put("a", None, ROOT, ticket)
    clock.now += TTL_SECONDS - 2 + 0.001
    assert cache.get("a", None) is None


def test_a_change_within_a_tenant_costs_nobody_else_a_look_up() -> None:
    cache = AuthCache()
    bolt = ROOT.within("bolt-id", "bolt", 1.0)
    remember(cache, "a")
    remember(cache, "b", "acme", ROOT.within("acme-id", "acme", 1.0))
    remember(cache, "b", "bolt", bolt)
    ticket = cache.begin()
    cache.clear_tenant("acme-id")
    cache.put("b", "acme", ROOT, ticket)  # looked up before the change
    assert cache.get("b", "acme") is None
    assert cache.get("b", "bolt") is bolt
    assert cache.get("a", None) is ROOT


def test_every_change_while_a_key_is_looked_up_counts() -> None:
    cache = AuthCache()
    within_acme = partial(cache.clear_tenant, "acme-id")
    for change in (cache.clear, cache.clear, within_acme, within_acme):
        ticket = cache.begin()
        change()
        cache.put("a", None, ROOT, ticket)
        assert cache.get("a", None) is None


def test_a_key_is_known_for_the_tenant_that_it_was_looked_up_for() -> None:
    cache = AuthCache()
    remember(cache, "a", "acme")
    assert cache.get("a", "acme") is ROOT
    assert cache.get("a", "bolt") is None
    assert cache.get("a", None) is None
    assert cache.get("aacme", None) is None


def test_a_change_while_a_key_is_looked_up_makes_the_result_worthless() -> None:
    cache = AuthCache()
    ticket = cache.begin()
    cache.clear()
    cache.put("a", None, ROOT, ticket)
    assert cache.get("a", None) is None


def test_a_change_and_a_refusal_are_known_at_once() -> None:
    cache = AuthCache()
    for forget in (cache.clear, lambda: cache.drop("a", None)):
        remember(cache, "a")
        forget()
        assert cache.get("a", None, allow_stale=True) is None


def test_what_is_old_is_there_for_when_it_cannot_be_looked_up_but_not_for_ever() -> None:
    clock = Clock()
    cache = AuthCache(clock=clock)
    remember(cache, "a")
    clock.now += MAX_STALE_SECONDS
    assert cache.get("a", None, allow_stale=True) is ROOT
    clock.now += 0.001
    assert cache.get("a", None, allow_stale=True) is None


def test_its_size_is_bounded_and_the_oldest_goes_first() -> None:
    cache = AuthCache(max_entries=3)
    for number in range(5):
        remember(cache, str(number))
    assert [cache.get(str(number), None) for number in range(5)] == [None, None, ROOT, ROOT, ROOT]


def test_what_was_looked_up_anew_is_not_the_oldest() -> None:
    cache = AuthCache(max_entries=2)
    for token in ("a", "b", "a", "c"):
        remember(cache, token)
    assert [cache.get(token, None) for token in "abc"] == [ROOT, None, ROOT]


def test_entries_that_are_too_old_to_be_used_are_dropped() -> None:
    clock = Clock()
    cache = AuthCache(clock=clock)
    for token in "abc":
        remember(cache, token)
    clock.now += MAX_STALE_SECONDS + 1
    remember(cache, "d")
    assert len(cache) == 1


def test_an_entry_that_may_be_used_in_an_outage_outlives_other_look_ups() -> None:
    clock = Clock()
    cache = AuthCache(clock=clock)
    remember(cache, "a")
    clock.now += MAX_STALE_SECONDS
    remember(cache, "b")
    assert cache.get("a", None, allow_stale=True) is ROOT


def test_a_look_up_that_took_too_long_leaves_nothing() -> None:
    clock = Clock()
    cache = AuthCache(stale_seconds=0.0, clock=clock)
    ticket = cache.begin()
    clock.now += TTL_SECONDS + 1
    cache.put("a", None, ROOT, ticket)
    assert len(cache) == 0


def test_no_key_is_kept_in_the_clear() -> None:
    cache = AuthCache()
    remember(cache, "lpx_live_secret")
    assert "lpx_live_secret" not in repr(vars(cache))


def test_a_key_is_current_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = utc_now()
    monkeypatch.setattr(auth_cache, "utc_now", lambda: now)
    assert is_current(ROOT)
    for microseconds, expected in ((1, True), (0, False), (-1, False)):
        ending = replace(ROOT, expires_at=now + timedelta(microseconds=microseconds))
        assert is_current(ending) is expected
