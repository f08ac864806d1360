"""The transitions of versions and uploads: every pair of states, through the services."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy.exc import IntegrityError

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState, VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidTransition
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import bring_to, make_version
from support.uploads import bring_upload_to, make_upload

VERSION_WAYS = {
    ("validated", "attesting"),
    ("validated", "rejected"),
    ("validated", "deleting"),
    ("attesting", "ready"),
    ("attesting", "rejected"),
    ("attesting", "deleting"),
    ("ready", "deleting"),
    ("rejected", "deleting"),
    ("deleting", "deleted"),
}
UPLOAD_WAYS = {
    ("receiving", "validating"),
    ("receiving", "abandoned"),
    ("validating", "accepted"),
    ("validating", "rejected"),
}


def change_version(session: TenantSession, version_id: str, target: VersionState) -> None:
    match target:
        case VersionState.ATTESTING:
            catalog.begin_attestation(session, version_id)
        case VersionState.READY:
            catalog.mark_ready(session, version_id, attestation_report={})
        case VersionState.REJECTED:
            catalog.mark_rejected(session, version_id, reason="no_effect", message="-")
        case VersionState.DELETING:
            catalog.begin_adapter_deletion(session, "support-bot")
        case VersionState.DELETED:
            catalog.finish_deletion(session, version_id)
        case VersionState.VALIDATED:
            raise AssertionError("no service leads back")


def change_upload(
    session: TenantSession, upload: Upload, target: UploadState, version_id: str
) -> None:
    match target:
        case UploadState.VALIDATING:
            uploads.begin_validation(session, upload.id)
        case UploadState.ACCEPTED:
            uploads.mark_accepted(session, upload.id, version_id)
        case UploadState.REJECTED:
            uploads.mark_refused(session, upload.id, reason="digest_mismatch", message="-")
        case UploadState.ABANDONED:
            uploads.abandon_upload(session, upload.id)
        case UploadState.RECEIVING:
            raise AssertionError("no service leads back")


TARGETS = sorted(set(VersionState) - {VersionState.VALIDATED, VersionState.DELETING})


@pytest.mark.parametrize(
    ("current", "target"), list(itertools.product(VersionState, TARGETS)), ids=str
)
def test_a_version_goes_the_allowed_ways_only(
    database: Database, acme: Tenant, current: VersionState, target: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=current)
        if (current, target) in VERSION_WAYS:
            change_version(session, version.id, target)
            assert version.state is target
            assert version.state_changed_at > version.created_at
        else:
            with pytest.raises(InvalidTransition, match=f"{current}.*{target}"):
                change_version(session, version.id, target)
            assert version.state is current


@pytest.mark.parametrize(
    "current", [state for state in VersionState if (state, "deleting") in VERSION_WAYS]
)
def test_every_visible_version_can_be_deleted(
    database: Database, acme: Tenant, current: VersionState
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=current)
        change_version(session, version.id, VersionState.DELETING)
        assert version.state is VersionState.DELETING


@pytest.mark.parametrize(
    ("current", "target"),
    list(itertools.product(UploadState, sorted(set(UploadState) - {UploadState.RECEIVING}))),
    ids=str,
)
def test_an_upload_goes_the_allowed_ways_only(
    database: Database, acme: Tenant, current: UploadState, target: UploadState
) -> None:
    with database.transaction(acme.id) as session:
        upload, version = make_upload(session), make_version(session)
        bring_upload_to(session, upload, current)
        if (current, target) in UPLOAD_WAYS:
            change_upload(session, upload, target, version.id)
            assert upload.state is target
        else:
            with pytest.raises(InvalidTransition, match=f"{current}.*{target}"):
                change_upload(session, upload, target, version.id)
            assert upload.state is current


def test_the_database_refuses_an_unknown_state(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        bring_to(session, make_version(session, state=VersionState.VALIDATED), VersionState.READY)
    with pytest.raises(IntegrityError), database.platform_transaction() as session:
        session.connection().exec_driver_sql("UPDATE adapter_versions SET state = 'usable'")
