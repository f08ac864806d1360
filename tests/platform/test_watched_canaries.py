"""Canaries with limits: what is counted, and how they end by themselves."""

from __future__ import annotations

from sqlalchemy import select

from loraplex.platform.adapters import canary_counts
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.canary import Canary
from loraplex.platform.adapters.canary_limits import CanaryLimits
from loraplex.platform.adapters.canary_models import CanaryCounts
from loraplex.platform.adapters.canary_sums import Arm, ArmSums, Split
from loraplex.platform.adapters.registry import Meaning, parse_model_name, resolve
from loraplex.platform.adapters.states import AliasAction
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version

NAME = "support-bot"
LIMITS = CanaryLimits(error_rate=0.1, length=None)
WATCHED = Canary(2, 10.0, LIMITS)


def make_split(session: TenantSession, canary: Canary = WATCHED, main: int = 1) -> Split:
    """`prod` of three versions, split; where its requests are counted."""
    for number in range(1, 4):
        make_version(session, NAME, f"content {number}")
    return split(session, canary, main)


def split(session: TenantSession, canary: Canary, main: int = 1) -> Split:
    catalog.set_alias(session, NAME, "prod", main, canary=canary)
    return split_of(session)


def split_of(session: TenantSession) -> Split:
    arm = mean(session).main.arm
    assert arm is not None
    return arm.split


def mean(session: TenantSession) -> Meaning:
    return resolve(session, parse_model_name(NAME), tenant_slug="acme")


def num_counts(session: TenantSession) -> int:
    return len(session.scalars(select(CanaryCounts)).all())


def test_both_versions_of_a_watched_split_are_counted_apart(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        meaning = mean(session)
        assert meaning.canary is not None
        assert (meaning.main.arm, meaning.canary.arm) == (Arm(watched, False), Arm(watched, True))
        assert catalog.find_limits(session, watched) == LIMITS


def test_a_split_without_limits_is_not_counted(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(2, 10.0))
        assert {version.arm for version in mean(session).versions} == {None}
        assert catalog.find_limits(session, watched) is None


def test_the_sums_of_several_servers_add_up(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
    one, two = ArmSums(num_requests=3, log_time_sum=0.5), ArmSums(num_requests=4, num_errors=1)
    for arms in ({Arm(watched, False): one}, {Arm(watched, False): two, Arm(watched, True): one}):
        with database.statements(acme.id) as statements:
            canary_counts.add(statements, arms)
    with database.transaction(acme.id, read_only=True) as session:
        total = ArmSums(num_requests=7, num_errors=1, log_time_sum=0.5)
        assert canary_counts.read(session, watched) == (total, one)


def test_each_change_of_the_alias_begins_at_zero(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        first = make_split(session)
        canary_counts.add(session, {Arm(first, True): ArmSums(num_requests=5)})
        assert split(session, WATCHED) == first, "the same target is no change"
        assert num_counts(session) == 1
        other = split(session, Canary(2, 10.0, CanaryLimits()))
        assert other != first, "other limits are a change"
        assert num_counts(session) == 0
        canary_counts.add(session, {Arm(first, True): ArmSums(num_requests=5)})
        assert canary_counts.read(session, other) == (ArmSums(), ArmSums()), "a late request"


def test_the_sums_go_with_the_alias(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        canary_counts.add(session, {Arm(watched, True): ArmSums(num_requests=5)})
        catalog.remove_alias(session, NAME, "prod")
        assert num_counts(session) == 0


def test_another_tenant_neither_reads_nor_forgets_the_sums(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        canary_counts.add(session, {Arm(watched, True): ArmSums(num_requests=5)})
    with database.transaction(bolt.id) as session:
        assert canary_counts.read(session, watched) == (ArmSums(), ArmSums())
        canary_counts.forget(session, watched.adapter_id, "prod")
    with database.transaction(acme.id) as session:
        assert num_counts(session) == 1


def test_a_canary_that_ends_leaves_the_main_version_and_the_reason(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        row = catalog.end_canary(session, watched, "too many errors")
        assert row is not None
        assert (row.version.number, row.canary_version, row.canary_limits) == (1, None, None)
        last, before = catalog.list_alias_changes(session, NAME, "prod")
        assert (last.action, last.reason) == (AliasAction.ROLLBACK, "too many errors")
        assert last.changed_by == "system"
        assert (before.canary_number, before.canary_limits) == (2, LIMITS.as_json())
        assert before.reason is None


def test_a_change_since_then_keeps_its_canary(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        split(session, Canary(3, 10.0, LIMITS))
        assert catalog.end_canary(session, watched, "too many errors") is None
        assert catalog.get_alias(session, NAME, "prod").canary_percent == 10.0
        catalog.remove_alias(session, NAME, "prod")
        assert catalog.end_canary(session, watched, "too many errors") is None


def test_a_rollback_of_the_tenant_goes_behind_the_ended_canary(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_split(session, Canary(1, 50.0, LIMITS), main=3)
        catalog.set_alias(session, NAME, "prod", 1)
        split(session, Canary(2, 1.0, LIMITS))
        watched = split(session, WATCHED)
        catalog.end_canary(session, watched, "too many errors")
        row = catalog.rollback_alias(session, NAME, "prod")
        assert row.canary_version is not None
        assert (row.version.number, row.canary_version.number) == (3, 1)
        assert row.canary_limits == LIMITS.as_json(), "and it is watched again"
        assert split_of(session).change_number == 6


def test_an_alias_without_another_version_before_has_nothing_to_go_back_to(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        watched = make_split(session)
        catalog.end_canary(session, watched, "too many errors")
        last = catalog.list_alias_changes(session, NAME, "prod")[0]
        assert last.previous_number is None
