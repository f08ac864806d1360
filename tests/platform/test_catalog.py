"""The catalog: numbers, content, aliases and deletion within one tenant and between two."""

from __future__ import annotations

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.platform.adapters import repository
from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.listing import AdapterQuery, list_summaries
from loraplex.platform.adapters.lookup import version_of
from loraplex.platform.adapters.repository import LiveContent
from loraplex.platform.adapters.states import LIVE_STATES, VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterBeingDeleted,
    AdapterNotFound,
    AdapterNotReady,
    AliasNotFound,
    InvalidTransition,
    InvalidValue,
    TenantNotFound,
    VersionAliased,
    VersionNotFound,
)
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_digest, make_new_version, make_version


def test_numbers_versions_from_one_in_each_adapter(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        numbers = [
            (name, make_version(session, name, content).number)
            for name, content in (("sql", "a"), ("sql", "b"), ("json", "a"), ("sql", "c"))
        ]
    assert numbers == [("sql", 1), ("sql", 2), ("json", 1), ("sql", 3)]


def test_numbers_versions_of_each_tenant(database: Database, acme: Tenant, bolt: Tenant) -> None:
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            assert make_version(session).number == 1


@pytest.mark.parametrize(
    "state", [VersionState.VALIDATED, VersionState.ATTESTING, VersionState.READY]
)
def test_the_same_content_keeps_its_number(
    database: Database, acme: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        first = make_version(session, state=state)
        make_version(session, content="other")
    with database.transaction(acme.id) as session:
        again = catalog.create_version(session, make_new_version())
        assert (again.version.id, again.version.state, again.is_new) == (first.id, state, False)


@pytest.mark.parametrize("state", [VersionState.REJECTED, VersionState.DELETED])
def test_refused_or_deleted_content_gets_a_new_number(
    database: Database, acme: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, state=state)
        again = catalog.create_version(session, make_new_version())
        assert (again.version.number, again.is_new) == (2, True)


def test_a_number_is_never_given_again(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for expected in (1, 2, 3):
            version = make_version(session, content=f"try {expected}", state=VersionState.DELETED)
            assert version.number == expected
        with pytest.raises(AdapterNotFound):
            catalog.get_adapter(session, "support-bot")


def test_refuses_content_that_is_being_deleted(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=VersionState.DELETING)
    with pytest.raises(AdapterBeingDeleted), database.transaction(acme.id) as session:
        make_version(session, "another-name")
    with database.transaction(bolt.id) as session:
        make_version(session)
    with database.transaction(acme.id) as session:
        catalog.finish_deletion(session, version.id)
        assert make_version(session, "another-name").number == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", "Ä"])
def test_refuses_bad_names(database: Database, acme: Tenant, name: str) -> None:
    with pytest.raises(InvalidValue), database.transaction(acme.id) as session:
        make_version(session, name)


def test_refuses_versions_of_no_tenant(database: Database) -> None:
    with pytest.raises(TenantNotFound), database.transaction("nobody") as session:
        make_version(session)


def test_keeps_reports_and_reasons(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "good")
        make_version(session, "bad", state=VersionState.REJECTED)
    with database.transaction(acme.id, read_only=True) as session:
        good = catalog.get_version(session, "good", 1)
        assert good.intake_report == {"num_tensors": 2}
        assert good.attestation_report == {"mean_shift": 1.5}
        bad = catalog.get_version(session, "bad", 1)
        assert (bad.reason_code, bad.reason_message) == ("no_effect", "It does nothing.")
        assert bad.attestation_report is None


def test_lists_adapters_with_visible_versions_and_aliases(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        make_version(session, "foreign")
    with database.transaction(acme.id) as session:
        make_version(session, "sql", "1", state=VersionState.DELETED)
        make_version(session, "sql", "2")
        make_version(session, "sql", "3", state=VersionState.ATTESTING)
        make_version(session, "json", "1", state=VersionState.REJECTED)
        make_version(session, "gone", "4", state=VersionState.DELETED)
        catalog.set_alias(session, "sql", "prod", 2)
    with database.transaction(acme.id, read_only=True) as session:
        listed = [
            (entry.adapter.name, entry.num_versions, entry.latest.number, entry.aliases)
            for entry in list_summaries(session, AdapterQuery(), limit=10)
        ]
    assert listed == [("json", 1, 1, {}), ("sql", 2, 3, {"prod": 2})]


def list_names(session: TenantSession) -> list[str]:
    return [entry.adapter.name for entry in list_summaries(session, AdapterQuery(), limit=100)]


def test_lists_adapters_page_by_page(database: Database, acme: Tenant, bolt: Tenant) -> None:
    names = [f"bot-{letter}" for letter in "abcdefg"]
    with database.transaction(bolt.id) as session:
        make_version(session, "bot-cc")
    with database.transaction(acme.id) as session:
        for name in reversed(names):
            make_version(session, name, name)
        make_version(session, "bot-bb", "gone", state=VersionState.DELETING)
    with database.transaction(acme.id, read_only=True) as session:
        pages = [list_summaries(session, AdapterQuery(), limit=3)]
        while pages[-1]:
            behind = pages[-1][-1].cursor
            pages.append(list_summaries(session, AdapterQuery(), after=behind, limit=3))
        listed = [[entry.adapter.name for entry in page] for page in pages]
        assert listed == [names[:3], names[3:6], names[6:], []]
        assert list_names(session) == names


def test_an_adapter_is_visible_as_long_as_one_of_its_versions(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        for content in "ab":
            make_version(session, content=content)
        catalog.begin_version_deletion(session, "support-bot", 2)
        assert list_names(session) == ["support-bot"]
        catalog.begin_version_deletion(session, "support-bot", 1)
        assert list_names(session) == []
        make_version(session, content="c", state=VersionState.VALIDATED)
        assert list_names(session) == ["support-bot"]
        catalog.begin_adapter_deletion(session, "support-bot")
        assert list_names(session) == []


def test_knows_the_contents_that_must_stay_stored(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        for state in VersionState:
            make_version(session, content=state, state=state)
        make_version(session, "another", "ready")
    with database.transaction(bolt.id) as session:
        make_version(session, content="deleted")
    with database.platform_transaction(read_only=True) as session:
        stored = repository.list_stored_contents_of_all_tenants(session)
    expected = {
        AdapterKey(acme.id, make_digest(state))
        for state in VersionState
        if state is not VersionState.DELETED
    }
    assert stored == expected | {AdapterKey(bolt.id, make_digest("deleted"))}


def test_content_is_called_by_its_live_versions_of_the_same_tenant(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        for state in sorted(VersionState, key=lambda state: state is VersionState.DELETING):
            make_version(session, state.value, state=state)
        live = repository.list_live_contents(session)
    with database.transaction(bolt.id) as session:
        make_version(session, "theirs")
        (theirs,) = repository.list_live_contents(session)
    mine = AdapterKey(acme.id, make_digest("weights"))
    names = sorted(state.value for state in LIVE_STATES)
    assert live == [LiveContent(mine, name, 1) for name in names]
    assert theirs == (AdapterKey(bolt.id, mine.digest), "theirs", 1)
    with database.platform_transaction(read_only=True) as session:
        assert sorted(repository.list_live_contents(session)) == sorted([*live, theirs])
        named = repository.names_of(session, {mine[:2]})
    assert named[mine[:2]] == [f"{name}@1" for name in names]


def test_another_tenants_adapter_is_not_there(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "support-bot")
    with database.transaction(bolt.id) as session:
        for name in ("support-bot", "never-was"):
            with pytest.raises(AdapterNotFound, match=f"There is no adapter '{name}'."):
                catalog.get_adapter(session, name)
            with pytest.raises(AdapterNotFound):
                catalog.set_alias(session, name, "prod", 1)
            with pytest.raises(AdapterNotFound):
                catalog.begin_adapter_deletion(session, name)


def test_an_alias_moves(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for content in "ab":
            make_version(session, content=content)
        made = catalog.set_alias(session, "support-bot", "prod", 1)
        assert made.version.number == 1
    with database.transaction(acme.id) as session:
        moved = catalog.set_alias(session, "support-bot", "prod", 2)
        assert (moved.id, moved.version.number) == (made.id, 2)
        assert [alias.name for alias in catalog.get_adapter(session, "support-bot").aliases] == [
            "prod"
        ]


@pytest.mark.parametrize("alias", ["latest", "3", "sha256:abc", "", "Prod"])
def test_refuses_aliases_that_read_as_something_else(
    database: Database, acme: Tenant, alias: str
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        with pytest.raises(InvalidValue):
            catalog.set_alias(session, "support-bot", alias, 1)


@pytest.mark.parametrize(
    "state", [VersionState.VALIDATED, VersionState.ATTESTING, VersionState.REJECTED]
)
def test_an_alias_points_at_a_ready_version(
    database: Database, acme: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, state=state)
        with pytest.raises(AdapterNotReady) as caught:
            catalog.set_alias(session, "support-bot", "prod", 1)
        assert caught.value.state == state


@pytest.mark.parametrize("state", [VersionState.DELETING, VersionState.DELETED])
def test_an_alias_does_not_point_at_a_deleted_version(
    database: Database, acme: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, content="a", state=state)
        make_version(session, content="b")
        with pytest.raises(VersionNotFound):
            catalog.set_alias(session, "support-bot", "prod", 1)


def test_removes_an_alias_once(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        catalog.set_alias(session, "support-bot", "prod", 1)
        catalog.remove_alias(session, "support-bot", "prod")
        with pytest.raises(AliasNotFound):
            catalog.remove_alias(session, "support-bot", "prod")


def test_an_aliased_version_is_not_deleted(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        catalog.set_alias(session, "support-bot", "prod", 1)
        catalog.set_alias(session, "support-bot", "eu", 1)
        with pytest.raises(VersionAliased) as caught:
            catalog.begin_version_deletion(session, "support-bot", 1)
        assert caught.value.aliases == ["eu", "prod"]
        assert catalog.get_version(session, "support-bot", 1).state is VersionState.READY


def test_deletion_hides_a_version_at_once(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        deletion = catalog.begin_version_deletion(session, "support-bot", 1)
    assert deletion.key == AdapterKey(acme.id, make_digest("weights"))
    assert not deletion.is_content_shared
    with database.transaction(acme.id) as session:
        with pytest.raises(AdapterNotFound):
            catalog.get_version(session, "support-bot", 1)
        with pytest.raises(AdapterNotFound):
            catalog.begin_version_deletion(session, "support-bot", 1)
        assert catalog.finish_deletion(session, version.id).state is VersionState.DELETED


def test_shared_content_outlives_the_first_of_its_versions(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        make_version(session, "theirs")
    with database.transaction(acme.id) as session:
        for name in ("one", "two"):
            make_version(session, name)
        first = catalog.begin_version_deletion(session, "one", 1)
        assert first.is_content_shared
        assert catalog.is_object_referenced(session, make_digest("weights"))
        last = catalog.begin_version_deletion(session, "two", 1)
        assert not last.is_content_shared
        assert not catalog.is_object_referenced(session, make_digest("weights"))
    with database.transaction(bolt.id, read_only=True) as session:
        assert catalog.is_object_referenced(session, make_digest("weights"))


def test_deletes_an_adapter_with_all_that_is_left_of_it(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, content="gone", state=VersionState.DELETED)
        kept = [
            make_version(session, content=content, state=state)
            for content, state in (("a", VersionState.READY), ("b", VersionState.REJECTED))
        ]
        catalog.set_alias(session, "support-bot", "prod", 2)
    with database.transaction(acme.id) as session:
        deletions = catalog.begin_adapter_deletion(session, "support-bot")
    assert [deletion.version_id for deletion in deletions] == [version.id for version in kept]
    with database.transaction(acme.id) as session:
        for deletion in deletions:
            catalog.finish_deletion(session, deletion.version_id)
        assert make_version(session, content="new").number == 4
        assert catalog.get_adapter(session, "support-bot").aliases == []


def test_two_versions_of_one_content_leave_nothing_when_their_adapter_goes(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, state=VersionState.REJECTED)
        make_version(session, state=VersionState.READY)
        deletions = catalog.begin_adapter_deletion(session, "support-bot")
    assert [deletion.is_content_shared for deletion in deletions] == [False, False]


@pytest.mark.parametrize("state", VersionState)
def test_finds_the_object_of_known_content(
    database: Database, acme: Tenant, bolt: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=state)
        found = repository.find_content(session, version.digest)
    assert (found is not None) == (state not in {VersionState.DELETING, VersionState.DELETED})
    with database.transaction(bolt.id, read_only=True) as session:
        assert repository.find_content(session, version.digest) is None


def test_takes_up_a_deletion_after_a_crash(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, "one")
        version = make_version(session, "two")
        begun = catalog.begin_version_deletion(session, "two", 1)
    with database.transaction(acme.id) as session:
        assert catalog.resume_deletion(session, version.id) == begun
        catalog.finish_deletion(session, version.id)
        with pytest.raises(InvalidTransition):
            catalog.resume_deletion(session, version.id)


def test_lists_the_unfinished_of_all_tenants(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    unfinished = {VersionState.VALIDATED, VersionState.ATTESTING, VersionState.DELETING}
    expected = set()
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            for state in VersionState:
                version = make_version(session, content=state, state=state)
                if state in unfinished:
                    expected.add(version.id)
    with database.platform_transaction(read_only=True) as session:
        listed = repository.list_unfinished_versions_of_all_tenants(session)
        assert {version.id for version in listed} == expected
        assert len(listed) == 6


def test_a_stale_copy_does_not_hide_a_change_of_state(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=VersionState.ATTESTING)
    with database.transaction(acme.id) as session:
        catalog.mark_rejected(session, version.id, reason="no_effect", message="-")
    with database.transaction(acme.id) as session:
        session.add(version)  # as it was before
        with pytest.raises(InvalidTransition):
            catalog.mark_ready(session, version.id, attestation_report={})


def test_finds_a_version_among_those_that_were_loaded(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for content in "ab":
            make_version(session, content=content)
    with database.transaction(acme.id, read_only=True) as session:
        adapter = catalog.get_adapter(session, "support-bot")
        assert [version_of(adapter, number).digest for number in (1, 2)] == [
            make_digest("a"),
            make_digest("b"),
        ]
        with pytest.raises(VersionNotFound, match="'support-bot' has no version 3"):
            version_of(adapter, 3)
