"""Uploads: resumable by offset, and never more acknowledged than declared."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.platform.adapters import repository, upload_upkeep, uploads
from loraplex.platform.adapters.models import Upload
from loraplex.platform.adapters.states import UploadState, VersionState
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    InvalidTransition,
    InvalidValue,
    UploadConflict,
    UploadNotFound,
)
from loraplex.platform.tenants.models import Tenant
from support.catalog import BASE_ID, make_version
from support.uploads import abandon_stale, bring_upload_to, make_upload

DECLARED = NewUpload(
    adapter_name="support-bot",
    config_json="{}",
    size_bytes=10,
    sha256="ab" * 32,
    server_id="here",
    aliases=("prod",),
)


def test_keeps_what_was_declared(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        made = make_upload(session, aliases=("prod", "eu"))
    with database.transaction(acme.id, read_only=True) as session:
        upload = uploads.get_upload(session, made.id)
        assert (upload.adapter_name, upload.size_bytes, upload.received_bytes) == (
            "support-bot",
            10,
            0,
        )
        assert upload.aliases == ["prod", "eu"]
        assert upload.state is UploadState.RECEIVING
        assert upload.config_json == '{"peft_type": "LORA"}'


def test_advances_piece_by_piece(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        upload_id = make_upload(session).id
    for offset, num_bytes in ((0, 4), (4, 0), (4, 6)):
        with database.transaction(acme.id) as session:
            uploads.advance_upload(session, upload_id, offset=offset, num_bytes=num_bytes)
    with database.transaction(acme.id) as session:
        assert uploads.begin_validation(session, upload_id).state is UploadState.VALIDATING


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(0, 4), (3, 2), (5, 1), (4, 7), (4, -1), (-1, 5), (10, 0)]
)
def test_refuses_bytes_that_do_not_fit(
    database: Database, acme: Tenant, offset: int, num_bytes: int
) -> None:
    with database.transaction(acme.id) as session:
        upload = make_upload(session)
        uploads.advance_upload(session, upload.id, offset=0, num_bytes=4)
        with pytest.raises(UploadConflict) as caught:
            uploads.advance_upload(session, upload.id, offset=offset, num_bytes=num_bytes)
        assert (caught.value.received_bytes, caught.value.size_bytes) == (4, 10)
        assert upload.received_bytes == 4


def test_refuses_to_begin_with_bytes_missing(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        upload = make_upload(session)
        uploads.advance_upload(session, upload.id, offset=0, num_bytes=9)
        with pytest.raises(UploadConflict):
            uploads.begin_validation(session, upload.id)
        assert upload.state is UploadState.RECEIVING


@pytest.mark.parametrize("state", sorted(set(UploadState) - {UploadState.RECEIVING}))
def test_a_closed_upload_takes_no_bytes(
    database: Database, acme: Tenant, state: UploadState
) -> None:
    with database.transaction(acme.id) as session:
        upload = make_upload(session)
        bring_upload_to(session, upload, state)
        with pytest.raises(InvalidTransition):
            uploads.advance_upload(session, upload.id, offset=10, num_bytes=0)


def test_says_what_it_became(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        upload, version = make_upload(session), make_version(session)
        bring_upload_to(session, upload, UploadState.VALIDATING)
        assert uploads.mark_accepted(session, upload.id, version.id).version_id == version.id


def test_says_why_it_was_refused(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        upload = make_upload(session)
        bring_upload_to(session, upload, UploadState.REJECTED)
        assert (upload.reason_code, upload.reason_message) == ("digest_mismatch", "Not it.")


def test_another_tenants_upload_is_not_there(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        upload_id = make_upload(session).id
    errors = []
    for wanted in (upload_id, "no such id"):
        with pytest.raises(UploadNotFound) as caught, database.transaction(bolt.id) as session:
            uploads.get_upload(session, wanted)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("adapter_name", "../x"),
        ("aliases", ("prod", "3")),
        ("size_bytes", 0),
        ("sha256", "AB" * 32),
        ("sha256", "ab" * 31),
    ],
)
def test_refuses_bad_declarations(
    database: Database, acme: Tenant, field: str, value: object
) -> None:
    new = replace(DECLARED, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidValue), database.transaction(acme.id) as session:
        uploads.open_upload(session, new)


def test_finds_the_place_of_a_sender_that_lost_it(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        begun = uploads.open_or_resume_upload(session, DECLARED)
        uploads.advance_upload(session, begun.id, offset=0, num_bytes=4)
    with database.transaction(acme.id) as session:
        again = uploads.open_or_resume_upload(session, DECLARED)
        assert (again.id, again.received_bytes) == (begun.id, 4)
    with database.transaction(bolt.id) as session:
        assert uploads.open_or_resume_upload(session, DECLARED).id != begun.id


@pytest.mark.parametrize(
    "change",
    [
        {"adapter_name": "sql"},
        {"config_json": "{ }"},
        {"size_bytes": 11},
        {"sha256": "cd" * 32},
        {"aliases": ("eu",)},
        {"server_id": "there"},
    ],
)
def test_does_not_go_on_with_what_was_declared_otherwise(
    database: Database, acme: Tenant, change: dict[str, object]
) -> None:
    with database.transaction(acme.id) as session:
        begun = uploads.open_or_resume_upload(session, DECLARED)
        other = replace(DECLARED, **change)  # type: ignore[arg-type]
        assert uploads.open_or_resume_upload(session, other).id != begun.id


@pytest.mark.parametrize("state", sorted(set(UploadState) - {UploadState.RECEIVING}))
def test_does_not_go_on_with_a_closed_upload(
    database: Database, acme: Tenant, state: UploadState
) -> None:
    with database.transaction(acme.id) as session:
        closed = uploads.open_or_resume_upload(session, DECLARED)
        bring_upload_to(session, closed, state)
        assert uploads.open_or_resume_upload(session, DECLARED).id != closed.id


@pytest.mark.parametrize(
    ("change", "base_id", "state", "is_known"),
    [
        ({}, BASE_ID, VersionState.READY, True),
        ({"aliases": ("eu",), "server_id": "there"}, BASE_ID, VersionState.VALIDATED, True),
        ({"adapter_name": "sql"}, BASE_ID, VersionState.READY, False),
        ({"config_json": "{ }"}, BASE_ID, VersionState.READY, False),
        ({"sha256": "cd" * 32}, BASE_ID, VersionState.READY, False),
        ({}, "other-base", VersionState.READY, False),
        ({}, BASE_ID, VersionState.REJECTED, False),
        ({}, BASE_ID, VersionState.DELETING, False),
    ],
)
def test_only_a_live_version_of_the_same_declaration_and_base_is_known_content(
    change: dict[str, Any],
    base_id: str,
    state: VersionState,
    is_known: bool,
    database: Database,
    acme: Tenant,
    bolt: Tenant,
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=state)
        upload = uploads.open_upload(session, DECLARED)
        bring_upload_to(session, upload, UploadState.VALIDATING)
        uploads.mark_accepted(session, upload.id, version.id)
        found = uploads.find_known_content(session, replace(DECLARED, **change), base_id=base_id)
        assert found is (version if is_known else None)
    with database.transaction(bolt.id) as session:
        assert uploads.find_known_content(session, DECLARED, base_id=BASE_ID) is None


@pytest.mark.parametrize("state", [VersionState.REJECTED, VersionState.DELETING])
def test_content_that_lives_no_more_is_not_accepted_without_its_bytes(
    state: VersionState, database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version = make_version(session, state=state)
        assert uploads.accept_known_content(session, DECLARED, version.id) is None
        assert uploads.list_unfinished_uploads(session) == []


def test_remembers_which_aliases_the_pushes_of_a_version_asked_for(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        version, other = make_version(session), make_version(session, content="other")
        for aliases, target in ((("prod", "eu"), version), (("us",), version), (("x",), other)):
            upload = make_upload(session, aliases=aliases, created_by="user:ada@example.com")
            bring_upload_to(session, upload, UploadState.VALIDATING)
            uploads.mark_accepted(session, upload.id, target.id)
        assert uploads.list_wanted_aliases(session, version.id) == [
            ("support-bot", "prod", "user:ada@example.com"),
            ("support-bot", "eu", "user:ada@example.com"),
            ("support-bot", "us", "user:ada@example.com"),
        ]


def test_lists_the_unfinished_of_all_tenants(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    expected = []
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            for state in UploadState:
                upload = make_upload(session)
                bring_upload_to(session, upload, state)
                if state in (UploadState.RECEIVING, UploadState.VALIDATING):
                    expected.append(upload.id)
    with database.platform_transaction(read_only=True) as session:
        listed = repository.list_unfinished_uploads_of_all_tenants(session)
        assert [upload.id for upload in listed] == expected


def test_abandons_what_nobody_goes_on_with(database: Database, acme: Tenant, bolt: Tenant) -> None:
    stale: list[Upload] = []
    kept: list[Upload] = []
    for tenant in (acme, bolt):
        with database.transaction(tenant.id) as session:
            for state in UploadState:
                upload = make_upload(session)
                bring_upload_to(session, upload, state)
                (stale if state is UploadState.RECEIVING else kept).append(upload)
    states = {upload.id: upload.state for upload in kept}
    assert abandon_stale(database, utc_now() - timedelta(hours=1)) == []
    assert abandon_stale(database, utc_now()) == [upload.id for upload in stale]
    assert abandon_stale(database, utc_now()) == []
    for upload in (*stale, *kept):
        with database.transaction(upload.tenant_id, read_only=True) as session:
            state = uploads.get_upload(session, upload.id).state
            assert state is states.get(upload.id, UploadState.ABANDONED)


def test_an_upload_that_still_receives_is_not_stale(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        idle, active = make_upload(session), make_upload(session)
    moment = utc_now()
    with database.transaction(acme.id) as session:
        uploads.advance_upload(session, active.id, offset=0, num_bytes=4)
    assert abandon_stale(database, moment) == [idle.id]
    with database.transaction(acme.id) as session:
        assert (
            uploads.advance_upload(session, active.id, offset=4, num_bytes=6).received_bytes == 10
        )
        with pytest.raises(InvalidTransition):
            uploads.advance_upload(session, idle.id, offset=0, num_bytes=1)


# --- closed uploads are forgotten ---------------------------------------------------------------


def purge(database: Database, *, days: int = 0) -> int:
    with database.platform_transaction() as session:
        return upload_upkeep.purge(session, utc_now() - timedelta(days=days))


def kept(database: Database, tenant: Tenant) -> set[str]:
    with database.transaction(tenant.id, read_only=True) as session:
        return set(session.scalars(select(Upload.id)))


def test_closed_uploads_are_forgotten_and_open_ones_are_not(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        made = {state: make_upload(session) for state in UploadState}
        for state, upload in made.items():
            bring_upload_to(session, upload, state)
    assert purge(database, days=1) == 0, "they are young"
    assert purge(database) == 2
    forgotten = {made[state].id for state in (UploadState.REJECTED, UploadState.ABANDONED)}
    assert kept(database, acme) == {upload.id for upload in made.values()} - forgotten
    assert purge(database) == 0


def test_what_a_version_came_from_is_kept_and_repeated_pushes_are_not(
    database: Database, acme: Tenant
) -> None:
    other_file = replace(DECLARED, sha256="cd" * 32)
    with database.transaction(acme.id) as session:
        version = make_version(session, content="of the upload")
        opened = [uploads.open_upload(session, new) for new in (DECLARED, DECLARED, other_file)]
        for upload in opened:
            uploads.advance_upload(session, upload.id, offset=0, num_bytes=10)
            uploads.begin_validation(session, upload.id)
            uploads.mark_accepted(session, upload.id, version.id)
        first, _, other = (upload.id for upload in opened)
    assert purge(database) == 1
    assert kept(database, acme) == {first, other}
    with database.transaction(acme.id) as session:
        found = repository.find_live_version_of_upload(
            session, "support-bot", sha256="ab" * 32, config_json="{}", base_id=version.base_id
        )
    assert found is not None
    assert found.id == version.id, "pushing it again sends nothing still"


def test_more_are_forgotten_than_fit_a_transaction(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_upkeep, "ROWS_AT_ONCE", 2)
    with database.transaction(acme.id) as session:
        for _ in range(3):
            bring_upload_to(session, make_upload(session), UploadState.ABANDONED)
    assert [purge(database) for _ in range(3)] == [2, 1, 0]
