"""Wishes: tenants' pins and prefetches, until they expire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from loraplex.adapters.identity import AdapterKey
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.models import AdapterWish
from loraplex.platform.adapters.states import VersionState, WishKind
from loraplex.platform.adapters.wishes import (
    WishedContent,
    list_live_wishes_of_all_tenants,
    list_wishes,
    remove_expired,
    remove_wish,
    set_wish,
)
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterNotFound,
    AdapterNotReady,
    InvalidValue,
    TooManyPins,
    VersionNotFound,
)
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import BASE_ID, make_digest, make_version

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
NAME = "support-bot"


def list_numbers(session: TenantSession, at: datetime) -> list[tuple[int, WishKind]]:
    return [(wish.version.number, wish.kind) for wish in list_wishes(session, NAME, now=at)]


def list_wished(database: Database, at: datetime) -> list[WishedContent]:
    with database.platform_transaction(read_only=True) as session:
        return list(list_live_wishes_of_all_tenants(session, at))


def test_a_wish_lives_until_it_expires(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        wish = set_wish(session, NAME, 1, WishKind.PIN, ttl_seconds=60, now=NOW)
        assert (wish.created_at, wish.expires_at) == (NOW, NOW + MINUTE)
    assert wish.version.number == 1
    with database.transaction(acme.id, read_only=True) as session:
        assert list_numbers(session, NOW + 0.99 * MINUTE) == [(1, WishKind.PIN)]
        assert list_numbers(session, NOW + MINUTE) == []
    key = AdapterKey(acme.id, make_digest("weights"))
    live = WishedContent(key, WishKind.PIN, NOW + MINUTE)
    assert list_wished(database, NOW + 0.99 * MINUTE) == [live]
    assert list_wished(database, NOW + MINUTE) == []


def test_a_wish_without_an_end_stays(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        assert set_wish(session, NAME, 1, WishKind.PREFETCH, now=NOW).expires_at is None
        assert list_numbers(session, NOW + 10**6 * MINUTE) == [(1, WishKind.PREFETCH)]
    with database.platform_transaction() as platform:
        assert remove_expired(platform, NOW + 10**6 * MINUTE) == 0


def test_a_wish_begins_anew(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        first = set_wish(session, NAME, 1, WishKind.PIN, created_by="ann", now=NOW)
        assert first.created_by == "ann"
        again = set_wish(session, NAME, 1, WishKind.PIN, ttl_seconds=60, now=NOW + MINUTE)
        assert again.created_by is None
        assert (again.created_at, again.expires_at) == (NOW + MINUTE, NOW + 2 * MINUTE)
        assert list_numbers(session, NOW + MINUTE) == [(1, WishKind.PIN)]


def test_pins_and_prefetches_are_two_wishes(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for content in ("one", "two"):
            make_version(session, content=content)
        set_wish(session, NAME, 2, WishKind.PREFETCH)
        set_wish(session, NAME, 2, WishKind.PIN)
        set_wish(session, NAME, 1, WishKind.PIN)
        assert list_numbers(session, NOW) == [
            (1, WishKind.PIN),
            (2, WishKind.PIN),
            (2, WishKind.PREFETCH),
        ]
        assert remove_wish(session, NAME, 2, WishKind.PIN)
        assert not remove_wish(session, NAME, 2, WishKind.PIN)
        assert list_numbers(session, NOW) == [(1, WishKind.PIN), (2, WishKind.PREFETCH)]


@pytest.mark.parametrize("seconds", [0.001, 366 * 86400])
def test_a_time_may_be_as_short_as_one_likes_and_as_long_as_a_leap_year(
    database: Database, acme: Tenant, seconds: float
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        wish = set_wish(session, NAME, 1, WishKind.PIN, ttl_seconds=seconds, now=NOW)
        assert wish.expires_at == NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e12, 366 * 86400 + 0.001])
def test_refuses_times_that_are_none(database: Database, acme: Tenant, seconds: float) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        with pytest.raises(InvalidValue) as caught:
            set_wish(session, NAME, 1, WishKind.PIN, ttl_seconds=seconds)
        assert caught.value.param == "ttl_seconds"


@pytest.mark.parametrize("kind", WishKind)
def test_wishes_for_ready_versions_only(
    database: Database, acme: Tenant, bolt: Tenant, kind: WishKind
) -> None:
    with database.transaction(bolt.id) as session:
        make_version(session)
    with database.transaction(acme.id) as session:
        with pytest.raises(AdapterNotFound):
            set_wish(session, NAME, 1, kind)
        with pytest.raises(AdapterNotFound):
            list_wishes(session, NAME)
        make_version(session, state=VersionState.ATTESTING)
        with pytest.raises(AdapterNotReady):
            set_wish(session, NAME, 1, kind)
        with pytest.raises(VersionNotFound):
            set_wish(session, NAME, 2, kind)
        with pytest.raises(VersionNotFound):
            remove_wish(session, NAME, 2, kind)


def test_limits_the_pins_that_a_tenant_has_at_once(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            for content in ("one", "two", "three"):
                make_version(session, content=content)
            for number in (1, 2):
                set_wish(session, NAME, number, WishKind.PIN, ttl_seconds=60, max_pins=2, now=NOW)
    with database.transaction(acme.id) as session:
        with pytest.raises(TooManyPins) as caught:
            set_wish(session, NAME, 3, WishKind.PIN, max_pins=2, now=NOW)
        assert caught.value.limit == 2
        set_wish(session, NAME, 3, WishKind.PREFETCH, max_pins=2, now=NOW)
        set_wish(session, NAME, 2, WishKind.PIN, max_pins=2, now=NOW)
        # The first has expired; the second was just set for ever.
        later = NOW + 2 * MINUTE
        set_wish(session, NAME, 3, WishKind.PIN, max_pins=2, now=later)
        with pytest.raises(TooManyPins):
            set_wish(session, NAME, 1, WishKind.PIN, max_pins=2, now=later)


@pytest.mark.parametrize("whole", [True, False], ids=["adapter", "version"])
def test_a_deletion_takes_the_wishes_along(database: Database, acme: Tenant, whole: bool) -> None:
    with database.transaction(acme.id) as session:
        for content in ("one", "two"):
            make_version(session, content=content)
        for kind in WishKind:
            set_wish(session, NAME, 1, kind, ttl_seconds=60, now=NOW)
        set_wish(session, NAME, 2, WishKind.PIN, now=NOW)
        if whole:
            catalog.begin_adapter_deletion(session, NAME)
        else:
            catalog.begin_version_deletion(session, NAME, 1)
    wished = list_wished(database, NOW)
    assert [wish.key.digest for wish in wished] == ([] if whole else [make_digest("two")])
    with database.platform_transaction(read_only=True) as platform:
        count = platform.scalar(select(func.count()).select_from(AdapterWish))
        assert count == len(wished)


def test_lists_what_all_tenants_wish_for(database: Database, acme: Tenant, bolt: Tenant) -> None:
    for minute, tenant in enumerate((bolt, acme)):
        with database.transaction(tenant.id) as session:
            make_version(session)
            set_wish(session, NAME, 1, WishKind.PIN, now=NOW + minute * MINUTE)
    keys = [AdapterKey(tenant.id, make_digest("weights")) for tenant in (bolt, acme)]
    assert [wish.key for wish in list_wished(database, NOW)] == keys


def test_content_of_several_versions_is_wished_for_once(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for name, seconds in (("one", 180), ("two", 60), ("three", 120)):
            make_version(session, name)
            set_wish(session, name, 1, WishKind.PIN, ttl_seconds=seconds, now=NOW)
    key = AdapterKey(acme.id, make_digest("weights"))
    assert list_wished(database, NOW) == [WishedContent(key, WishKind.PIN, NOW + 3 * MINUTE)]
    with database.transaction(acme.id) as session:
        set_wish(session, "two", 1, WishKind.PIN, now=NOW)
    assert list_wished(database, NOW) == [WishedContent(key, WishKind.PIN, None)]


def test_lists_the_wishes_of_one_base(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "one", "one")
        make_version(session, "two", "two", base_id="another base")
        for name in ("one", "two"):
            set_wish(session, name, 1, WishKind.PIN, now=NOW)
    with database.platform_transaction(read_only=True) as platform:
        for base_id, content in ((BASE_ID, "one"), ("another base", "two")):
            wished = list_live_wishes_of_all_tenants(platform, NOW, base_id=base_id)
            assert [wish.key.digest for wish in wished] == [make_digest(content)]


def test_forgets_what_has_expired(database: Database, acme: Tenant, bolt: Tenant) -> None:
    for tenant, seconds in ((acme, 60), (bolt, 120)):
        with database.transaction(tenant.id) as session:
            make_version(session)
            for kind in WishKind:
                set_wish(session, NAME, 1, kind, ttl_seconds=seconds, now=NOW)
    with database.platform_transaction() as platform:
        assert remove_expired(platform, NOW + MINUTE) == 2
        assert remove_expired(platform, NOW + MINUTE) == 0
        left = platform.scalars(select(AdapterWish.tenant_id)).all()
        assert left == [bolt.id, bolt.id]
