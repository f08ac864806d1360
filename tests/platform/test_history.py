"""The history of versions: state transitions and deletion receipts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import wishes
from loraplex.platform.adapters.states import VersionState, WishKind
from loraplex.platform.database import Database
from loraplex.platform.errors import AdapterNotFound, InvalidTransition, VersionNotFound
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_digest, make_version

NAME = "support-bot"
RECEIPT = {"device_bytes": 1024, "host_bytes": 2048, "num_drained": 1}
WAYS = {
    VersionState.VALIDATED: ["validated"],
    VersionState.ATTESTING: ["validated", "attesting"],
    VersionState.READY: ["validated", "attesting", "ready"],
    VersionState.REJECTED: ["validated", "attesting", "rejected"],
    VersionState.DELETING: ["validated", "attesting", "ready", "deleting"],
    VersionState.DELETED: ["validated", "attesting", "ready", "deleting", "deleted"],
}


@pytest.mark.parametrize("state", VersionState)
def test_remembers_each_state_and_when_it_began(
    database: Database, acme: Tenant, state: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, content="another")
        make_version(session, state=state)
    with database.transaction(acme.id, read_only=True) as session:
        version, transitions = catalog.version_history(session, NAME, 2)
        assert [transition.state for transition in transitions] == WAYS[state]
        assert [transition.number for transition in transitions] == list(
            range(1, len(transitions) + 1)
        )
        times = [transition.at for transition in transitions]
        assert times == sorted(times)
        assert times[0] == version.created_at
        if len(times) > 1:
            assert times[-1] == version.state_changed_at
        assert catalog.list_transitions(session, NAME, 2) == transitions


def test_remembers_why_a_version_was_rejected(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, state=VersionState.REJECTED)
        catalog.begin_version_deletion(session, NAME, 1)
        reasons = [
            (transition.state, transition.reason_code, transition.reason_message)
            for transition in catalog.list_transitions(session, NAME, 1)
        ]
    assert reasons == [
        ("validated", None, None),
        ("attesting", None, None),
        ("rejected", "no_effect", "It does nothing."),
        ("deleting", None, None),
    ]


def test_writes_nothing_down_of_a_transition_that_is_refused(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session)
        with pytest.raises(InvalidTransition):
            catalog.begin_attestation(session, version.id)
        assert len(catalog.list_transitions(session, NAME, 1)) == 3


def test_there_is_no_history_of_what_never_was(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        make_version(session)
    with database.transaction(acme.id) as session:
        with pytest.raises(AdapterNotFound):
            catalog.list_transitions(session, NAME, 1)
        with pytest.raises(AdapterNotFound):
            catalog.list_receipts(session, NAME)
        make_version(session)
        with pytest.raises(VersionNotFound):
            catalog.list_transitions(session, NAME, 2)


def test_a_receipt_outlives_the_adapter(database: Database, acme: Tenant, bolt: Tenant) -> None:
    with database.transaction(bolt.id) as session:
        make_version(session, state=VersionState.DELETED)
    with database.transaction(acme.id) as session:
        for content in ("one", "two"):
            make_version(session, content=content)
        deletions = catalog.begin_adapter_deletion(session, NAME)
        assert catalog.list_receipts(session, NAME) == []
    with database.transaction(acme.id) as session:
        for deletion, removed in zip(reversed(deletions), (RECEIPT, None), strict=True):
            catalog.finish_deletion(session, deletion.version_id, receipt=removed)
    with database.transaction(acme.id, read_only=True) as session:
        receipts = catalog.list_receipts(session, NAME)
        assert [
            (receipt.version_number, receipt.digest, receipt.receipt) for receipt in receipts
        ] == [(1, make_digest("one"), None), (2, make_digest("two"), RECEIPT)]
        for receipt in receipts:
            history = catalog.list_transitions(session, NAME, receipt.version_number)
            began, ended = history[-2:]
            assert (began.state, ended.state) == ("deleting", "deleted")
            assert (receipt.requested_at, receipt.finished_at) == (began.at, ended.at)
            assert receipt.requested_at < receipt.finished_at


def test_a_deletion_that_is_taken_up_again_began_when_it_began(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session)
        begun = catalog.begin_version_deletion(session, NAME, 1)
        requested_at = catalog.list_transitions(session, NAME, 1)[-1].at
    with database.transaction(acme.id) as session:
        catalog.resume_deletion(session, begun.version_id)
    with database.transaction(acme.id) as session:
        catalog.finish_deletion(session, begun.version_id, receipt=RECEIPT)
        with pytest.raises(InvalidTransition):
            catalog.finish_deletion(session, begun.version_id, receipt={})
        (receipt,) = catalog.list_receipts(session, NAME)
        assert (receipt.requested_at, receipt.receipt) == (requested_at, RECEIPT)


@pytest.mark.parametrize(
    "table",
    ["adapter_alias_changes", "adapter_version_transitions", "adapter_wishes", "deletion_receipts"],
)
def test_the_database_refuses_to_give_a_row_to_another_tenant(
    database: Database, acme: Tenant, bolt: Tenant, table: str
) -> None:
    with database.transaction(acme.id) as session:
        make_version(session, content="gone", state=VersionState.DELETED)
        make_version(session)
        catalog.set_alias(session, NAME, "prod", 2)
        wishes.set_wish(session, NAME, 2, WishKind.PIN)
    for tenant, is_refused in ((acme, False), (bolt, True)):
        expected = pytest.raises(IntegrityError) if is_refused else nullcontext()
        with expected, database.platform_transaction() as platform:
            statement = text(f"UPDATE {table} SET tenant_id = :tenant_id")
            updated = platform.connection().execute(statement, {"tenant_id": tenant.id})
            assert updated.rowcount >= 1
