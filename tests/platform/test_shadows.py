"""Shadows of aliases: what they follow, and the sums of their comparisons."""

from __future__ import annotations

import pytest

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import shadow_sums, shadows
from loraplex.platform.adapters.canary import Canary
from loraplex.platform.adapters.registry import Meaning, Shadow, parse_model_name, resolve
from loraplex.platform.adapters.shadow_models import AliasShadow
from loraplex.platform.adapters.shadow_sums import Compared
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterNotReady,
    AliasNotFound,
    BaseMismatch,
    InvalidValue,
    ShadowNotFound,
    VersionAliased,
    VersionNotFound,
)
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_version

NAME = "support-bot"


def make_alias(session: TenantSession) -> None:
    """`prod` on the first of three versions."""
    for number in range(1, 4):
        make_version(session, NAME, f"content {number}")
    catalog.set_alias(session, NAME, "prod", 1)


def make_shadow(session: TenantSession, number: int = 2, percent: float = 25.0) -> AliasShadow:
    return shadows.set_shadow(session, NAME, "prod", number, percent, set_by="key:k")


def mean(session: TenantSession) -> Meaning:
    return resolve(session, parse_model_name(NAME), tenant_slug="acme")


def shadow_of(session: TenantSession) -> Shadow:
    shadow = mean(session).main.shadow
    assert shadow is not None
    return shadow


def add(session: TenantSession, *compared: Compared | None) -> None:
    shadow = shadow_of(session)
    for each in compared:
        shadow_sums.add(session, shadow.split, shadow.version.version, each)
    session.flush()


def test_a_shadow_comes_with_the_aliass_own_version_only(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        assert mean(session).main.shadow is None
        make_shadow(session)
        catalog.set_alias(session, NAME, "prod", 1, canary=Canary(3, 10.0))
        meaning = mean(session)
        assert meaning.canary is not None
        assert meaning.canary.shadow is None
        shadow = shadow_of(session)
        assert (shadow.version.version, shadow.percent) == (2, 25.0)
        assert shadow.split.change_number == 2
        by_number = resolve(session, parse_model_name(f"{NAME}@1"), tenant_slug="acme")
        assert by_number.main.shadow is None


def test_the_sums_are_those_of_the_comparisons(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        make_shadow(session)
        add(
            session,
            Compared(is_equal=True, rouge=1.0, log_length_ratio=0.0),
            Compared(is_equal=False, rouge=0.25, log_length_ratio=0.5),
            None,
        )
    with database.transaction(acme.id, read_only=True) as session:
        row = shadows.get_shadow(session, NAME, "prod")
        assert (row.num_compared, row.num_equal, row.num_errors) == (2, 1, 1)
        assert (row.rouge_sum, row.log_length_sum) == (1.25, 0.5)
        assert row.rouge_counts == [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]


def test_the_same_shadow_again_keeps_its_sums(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        make_shadow(session)
        add(session, None)
        assert make_shadow(session).num_errors == 1
        assert make_shadow(session, percent=30.0).num_errors == 0
        assert make_shadow(session, number=3).version_number == 3


def test_a_change_of_the_alias_begins_a_comparison_at_zero(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        make_shadow(session)
        add(session, None)
        before = shadow_of(session)
        catalog.set_alias(session, NAME, "prod", 3)
        shadow_sums.add(session, before.split, 2, None)
        row = shadows.get_shadow(session, NAME, "prod")
        assert (row.num_errors, row.change_number) == (0, 2), "nor do late ones count"


def test_a_shadow_ends_when_it_is_released_or_its_alias_removed(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        make_shadow(session)
        catalog.set_alias(session, NAME, "prod", 2)
        with pytest.raises(ShadowNotFound):
            shadows.get_shadow(session, NAME, "prod")
        make_shadow(session, number=3)
        catalog.remove_alias(session, NAME, "prod")
        with pytest.raises(AliasNotFound):
            shadows.get_shadow(session, NAME, "prod")
        catalog.set_alias(session, NAME, "prod", 1)
        with pytest.raises(ShadowNotFound):
            shadows.remove_shadow(session, NAME, "prod")


def test_a_shadows_version_cannot_be_deleted(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        make_shadow(session)
        with pytest.raises(VersionAliased):
            catalog.begin_version_deletion(session, NAME, 2)
        shadows.remove_shadow(session, NAME, "prod")
        catalog.begin_version_deletion(session, NAME, 2)


def test_what_cannot_be_a_shadow_is_refused(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, NAME, "content 1")
        with pytest.raises(AliasNotFound):
            make_shadow(session)
        for number in range(2, 4):
            make_version(session, NAME, f"content {number}")
        catalog.set_alias(session, NAME, "prod", 1)
        make_version(session, NAME, "waiting", state=VersionState.ATTESTING)
        make_version(session, NAME, "elsewhere", base_id="another base")
        for number, percent, error in (
            (1, 10.0, InvalidValue),
            (2, 0.0, InvalidValue),
            (2, 100.5, InvalidValue),
            (2, float("nan"), InvalidValue),
            (9, 10.0, VersionNotFound),
            (4, 10.0, AdapterNotReady),
            (5, 10.0, BaseMismatch),
        ):
            with pytest.raises(error):
                make_shadow(session, number, percent)


def test_another_tenant_adds_nothing(database: Database, acme: Tenant, bolt: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_alias(session)
        make_shadow(session)
        shadow = shadow_of(session)
    with database.transaction(bolt.id) as session:
        shadow_sums.add(session, shadow.split, 2, None)
    with database.transaction(acme.id, read_only=True) as session:
        assert shadows.get_shadow(session, NAME, "prod").num_errors == 0
