"""Samples of requests: who is asked, what is kept, for how long, and what is left afterwards."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from sqlalchemy import select

from loraplex.platform.adapters import registry
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.models import AdapterSampling
from loraplex.platform.adapters.sampling import (
    find_sampling,
    is_sampled,
    set_sampling,
    stop_sampling,
)
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterNotFound,
    InvalidValue,
    SampleNotFound,
    SampleUnreadable,
    SamplingForbidden,
)
from loraplex.platform.samples import service
from loraplex.platform.samples.models import Sample, SampleKind
from loraplex.platform.samples.sample_seal import SampleSeal
from loraplex.platform.samples.service import Added, SampleFilter
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version
from support.samples import SEAL, add, new_sample, opt_in

NAME = "support-bot"


def texts(session: TenantSession, wanted: SampleFilter = SampleFilter()) -> list[str]:
    """The answers that are kept, the newest first."""
    rows = service.list_with_content(session, NAME, wanted, after=None, limit=50)
    return [json.loads(SEAL.open(row))["answer"]["content"] for row in rows]


def test_the_share_of_the_requests_is_drawn_and_a_larger_share_includes_a_smaller_one() -> None:
    ids = [f"req-{number}" for number in range(20_000)]
    drawn = {
        percent: {id_ for id_ in ids if is_sampled(percent, adapter_id="a", request_id=id_)}
        for percent in (0.0, 5.0, 20.0, 100.0)
    }
    assert drawn[0.0] == set()
    assert drawn[100.0] == set(ids)
    assert drawn[5.0] < drawn[20.0]
    assert len(drawn[5.0]) == pytest.approx(1000, abs=150)  # 5 standard deviations
    other = {id_ for id_ in ids if is_sampled(20.0, adapter_id="b", request_id=id_)}
    assert len(drawn[20.0] & other) == pytest.approx(800, abs=150), "adapters draw independently"


def test_nothing_is_kept_unless_the_tenant_opted_in(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        assert find_sampling(session, NAME) is None
        assert add(session, new_sample(version)) == Added(0, 0)
        opt_in(session)
        assert add(session, new_sample(version)) == Added(1, 0)
        assert stop_sampling(session, NAME)
        assert not stop_sampling(session, NAME)
        assert add(session, new_sample(version)) == Added(0, 0)
        assert service.count(session, NAME) == 1, "those that exist stay"


def test_a_name_resolves_to_the_share_that_is_sampled(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        make_version(session, content="other")
        catalog.set_alias(
            session, NAME, "prod", 1, canary=catalog.Canary(2, 50.0), changed_by="system"
        )

        def shares() -> set[float]:
            name = registry.parse_model_name(NAME)
            meaning = registry.resolve(session, name, tenant_slug="acme")
            assert len(meaning.versions) == 2
            return {version.sampled_percent for version in meaning.versions}

        assert shares() == {0.0}
        opt_in(session)
        assert shares() == {100.0}


@pytest.mark.parametrize(
    ("percent", "days", "param"),
    [
        *((0.0, 1, "percent"), (100.1, 1, "percent"), (float("nan"), 1, "percent")),
        *((5.0, 0, "days"), (5.0, 31, "days")),
    ],
)
def test_a_share_or_time_outside_the_bounds_is_refused(
    database: Database, acme: Tenant, percent: float, days: int, param: str
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        with pytest.raises(InvalidValue) as refused:
            set_sampling(session, NAME, percent=percent, days=days, max_days=30, changed_by="a")
        assert refused.value.param == param
        assert find_sampling(session, NAME) is None


def test_the_operator_can_forbid_sampling(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        with pytest.raises(SamplingForbidden):
            set_sampling(session, NAME, percent=5.0, days=1, max_days=0, changed_by="a")
        with pytest.raises(AdapterNotFound):
            opt_in(session, "no-such")


def test_a_sample_is_encrypted_and_bound_to_its_row(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            version = make_version(session)
            opt_in(session)
            add(session, new_sample(version, text=f"The secret of {tenant.slug}"))
    with database.platform_transaction(read_only=True) as platform:
        first, second = platform.scalars(select(Sample)).all()
        assert b"secret" not in first.content
        assert b"The secret of" in SEAL.open(first)
        platform.expunge_all()
    first.content = second.content
    with pytest.raises(SampleUnreadable):
        SEAL.open(first)
    with pytest.raises(SampleUnreadable):
        SampleSeal([b"o" * 32]).open(second)


def test_another_tenants_samples_are_not_found(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session)
        add(session, new_sample(version))
        (row,) = service.list_samples(session, NAME, after=None, limit=9)
    with database.transaction(bolt.id) as session:
        make_version(session)
        with pytest.raises(SampleNotFound):
            service.get_sample(session, NAME, row.id)
        with pytest.raises(SampleNotFound):
            service.remove(session, NAME, row.id)
        assert service.list_samples(session, NAME, after=None, limit=9) == []
        assert service.erase(session, NAME) == 0
    with database.transaction(acme.id) as session:
        assert service.count(session, NAME) == 1


def test_a_sample_is_listed_by_version_and_kind_the_newest_first_in_pages(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        first, second = make_version(session), make_version(session, content="other")
        opt_in(session)
        now = utc_now() + timedelta(minutes=1)
        add(
            session,
            *(
                new_sample(second if number % 2 else first, text=str(number), at=at)
                for number in range(7)
                if (at := now + timedelta(seconds=number // 2))
            ),
            new_sample(first, text="cut", finish_reason="length", at=now),
            new_sample(first, text="plain", kind=SampleKind.COMPLETION, at=now),
        )
        assert set(texts(session, SampleFilter(version=2))) == {"1", "3", "5"}
        assert texts(session, SampleFilter(kind=SampleKind.COMPLETION)) == ["plain"]
        assert "cut" not in texts(session, SampleFilter(is_whole=True))
        paged: list[str] = []
        while True:
            after = paged[-1] if paged else None
            page = service.list_samples(session, NAME, after=after, limit=2)
            if not page:
                break
            paged += [row.id for row in page]
        whole = service.list_samples(session, NAME, after=None, limit=99)
        assert paged == [row.id for row in whole]
        moments = [row.created_at for row in whole]
        assert len(moments) == 9
        assert moments == sorted(moments, reverse=True)


def test_a_deletion_also_reaches_what_has_not_been_written(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session)
        add(session, new_sample(version), new_sample(version))
        late = new_sample(version)
        assert service.erase(session, NAME) == 2
        assert add(session, late) == Added(0, 0)
        assert add(session, new_sample(version)) == Added(1, 0), "sampling goes on"


def test_sampling_that_was_turned_on_again_keeps_nothing_from_before(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session)
        late = new_sample(version)
        stop_sampling(session, NAME)
        opt_in(session)
        assert add(session, late) == Added(0, 0)
        late = new_sample(version)
        opt_in(session, days=3)
        assert add(session, late) == Added(1, 0), "a change of the days does not turn it off"


def test_a_deleted_versions_samples_are_erased_and_the_others_stay(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        first, second = make_version(session), make_version(session, content="other")
        opt_in(session)
        add(session, new_sample(first, text="first"), new_sample(second, text="second"))
        catalog.begin_version_deletion(session, NAME, 1)
        assert add(session, new_sample(first)) == Added(0, 0)
        assert service.erase_version(session, first.id) == 1
        assert texts(session) == ["second"]
        assert find_sampling(session, NAME) is not None


def test_an_adapter_of_the_same_name_is_asked_for_again(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        opt_in(session)
        catalog.begin_adapter_deletion(session, NAME)
        assert session.scalars(select(AdapterSampling)).all() == []
        make_version(session, content="new")
        assert find_sampling(session, NAME) is None


def test_samples_expire_and_are_erased(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session, days=7)
        row = session.scalars(select(AdapterSampling)).one()
        row.since = utc_now() - timedelta(days=40)
        for age in (1, 6, 8):
            add(session, new_sample(version, text=str(age), at=utc_now() - timedelta(days=age)))
        assert texts(session) == ["1", "6"], "what has expired is not shown"
    with database.platform_transaction() as platform:
        assert service.purge(platform, utc_now(), 30) == 1
        assert service.purge(platform, utc_now(), 30) == 0
        assert service.purge(platform, utc_now(), 3) == 1, "older than the operator allows now"
        assert service.purge(platform, utc_now(), 0) == 1, "the operator allows none"


def test_the_operators_maximum_bounds_an_opt_in_from_before(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session, days=20)
        add(session, new_sample(version), max_days=2)
        (row,) = service.list_samples(session, NAME, after=None, limit=1)
        assert row.expires_at - row.created_at == timedelta(days=2)


def test_what_a_tenant_has_no_room_for_is_dropped(
    database: Database, acme: Tenant, bolt: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session)
        small, large = new_sample(version), new_sample(version, text="x" * 500)
        monkeypatch.setattr(service, "MAX_SAMPLES", 3)
        monkeypatch.setattr(service, "MAX_TENANT_BYTES", 2 * len(small.content) + 50)
        assert add(session, small, large, small) == Added(2, 1)
        assert add(session, small) == Added(0, 1)
        monkeypatch.setattr(service, "MAX_TENANT_BYTES", 1 << 20)
        assert add(session, small, small) == Added(1, 1)
    with database.transaction(bolt.id) as session:
        version = make_version(session)
        opt_in(session)
        assert add(session, new_sample(version)) == Added(1, 0), "another tenant has its own room"


def test_samples_are_encrypted_anew_under_the_present_secret(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CONTENTS_AT_ONCE", 2)
    with database.transaction(acme.id) as session:
        version = make_version(session)
        opt_in(session)
        add(session, *(new_sample(version, text=str(number)) for number in range(5)))
    lost, rotated = SampleSeal([b"n" * 32]), SampleSeal([b"n" * 32, b"s" * 32])

    def reseal_all(seal: SampleSeal) -> None:
        last: str | None = ""
        while last is not None:
            with database.platform_transaction() as platform:
                last = service.reseal(platform, seal, last)

    reseal_all(lost)  # cannot read them, and changes nothing
    with database.transaction(acme.id, read_only=True) as session:
        rows = session.scalars(select(Sample)).all()
        assert {json.loads(SEAL.open(row))["answer"]["content"] for row in rows} == set("01234")
    reseal_all(rotated)
    with database.transaction(acme.id, read_only=True) as session:
        rows = session.scalars(select(Sample)).all()
        assert {row.secret_id for row in rows} == {rotated.current_id}
        assert {json.loads(lost.open(row))["answer"]["content"] for row in rows} == set("01234")
