"""Limits on owned resources: counted as the tenant sees them; the last place is given once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import uploads
from loraplex.platform.adapters.states import UploadState, VersionState
from loraplex.platform.adapters.uploads import NewUpload
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import QuotaExceeded
from loraplex.platform.keys.models import ApiKey
from loraplex.platform.keys.principal import TenantRole
from loraplex.platform.quotas import service as quotas
from loraplex.platform.quotas.service import Resource
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.users import service as users
from loraplex.platform.users.models import User
from support.catalog import bring_to, make_new_version, make_version
from support.identity import caller_of
from support.limits import limit
from support.uploads import bring_upload_to

NUM_THREADS = 6


def used(database: Database, tenant: Tenant, resource: Resource) -> int | None:
    with database.transaction(tenant.id, read_only=True) as session:
        return quotas.current_use(session).uses[resource].used


def push(database: Database, tenant: Tenant, name: str, content: str) -> None:
    with database.transaction(tenant.id) as session:
        make_version(session, name, content)


def make_new_upload(name: str = "bot", size_bytes: int = 10, sha256: str = "0" * 64) -> NewUpload:
    return NewUpload(
        adapter_name=name,
        config_json="{}",
        size_bytes=size_bytes,
        sha256=sha256,
        server_id="here",
    )


def test_counts_adapters_while_a_version_of_them_is_left(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, adapters=1)
    push(database, acme, "a", "one")
    push(database, acme, "a", "two")
    with pytest.raises(QuotaExceeded, match="1 adapters: 1 are used"):
        push(database, acme, "b", "three")
    with database.transaction(acme.id) as session:
        catalog.begin_adapter_deletion(session, "a")
    push(database, acme, "b", "three")
    with pytest.raises(QuotaExceeded):
        push(database, acme, "a", "four")


def test_counts_all_versions_that_are_not_deleted(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, versions_per_adapter=2)
    with database.transaction(acme.id) as session:
        first = make_version(session, "a", "one", state=VersionState.REJECTED)
    push(database, acme, "a", "two")
    with database.transaction(acme.id) as session:
        assert not catalog.create_version(session, make_new_version("a", "two")).is_new
    push(database, acme, "b", "one")
    with pytest.raises(QuotaExceeded, match="2 versions of one adapter: 2 are used"):
        push(database, acme, "a", "three")
    with database.transaction(acme.id) as session:
        catalog.begin_version_deletion(session, "a", first.number)
    push(database, acme, "a", "three")
    assert used(database, acme, Resource.VERSIONS_PER_ADAPTER) == 2


def test_counts_equal_content_once_until_it_is_removed(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, stored_bytes=10)
    push(database, acme, "a", "sixsix")
    push(database, acme, "b", "sixsix")
    assert used(database, acme, Resource.STORED_BYTES) == 6
    with pytest.raises(QuotaExceeded, match="10 stored bytes: 6 are used, and this needs 5 more"):
        push(database, acme, "a", "fiver")
    push(database, acme, "a", "four")
    with database.transaction(acme.id) as session:
        deletions = [
            *catalog.begin_adapter_deletion(session, "a"),
            *catalog.begin_adapter_deletion(session, "b"),
        ]
    assert used(database, acme, Resource.STORED_BYTES) == 10
    with database.transaction(acme.id) as session:
        for deletion in deletions:
            catalog.finish_deletion(session, deletion.version_id)
    assert used(database, acme, Resource.STORED_BYTES) == 0


def test_counts_what_is_on_its_way_when_an_upload_begins(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, stored_bytes=25)
    with database.transaction(acme.id) as session:
        first = uploads.open_or_resume_upload(session, make_new_upload(sha256="1" * 64))
        uploads.open_or_resume_upload(session, make_new_upload(sha256="2" * 64))
    with database.transaction(acme.id) as session:
        resumed = uploads.open_or_resume_upload(session, make_new_upload(sha256="1" * 64))
        assert resumed.id == first.id
        with pytest.raises(QuotaExceeded, match="20 are used, and this needs 10 more"):
            uploads.open_or_resume_upload(session, make_new_upload(sha256="3" * 64))
        uploads.abandon_upload(session, first.id)
        session.flush()
        uploads.open_or_resume_upload(session, make_new_upload(sha256="3" * 64))


def test_an_upload_may_fill_all_that_is_allowed(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, stored_bytes=10)
    with database.transaction(acme.id) as session:
        uploads.open_or_resume_upload(session, make_new_upload(size_bytes=10))


def test_counts_an_upload_that_is_being_checked(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, stored_bytes=15)
    with database.transaction(acme.id) as session:
        upload = uploads.open_or_resume_upload(session, make_new_upload())
        bring_upload_to(session, upload, UploadState.VALIDATING)
        with pytest.raises(QuotaExceeded, match="10 are used"):
            uploads.open_or_resume_upload(session, make_new_upload(sha256="3" * 64))


def test_counts_usable_keys_and_active_users(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, keys=1, users=1)
    now = utc_now()
    with database.transaction(acme.id) as session:
        for number, revoked_at, expires_at in (
            (1, now, None),
            (2, None, now),
            (3, None, now + timedelta(days=365)),
        ):
            session.add(_key(number, revoked_at=revoked_at, expires_at=expires_at))
        session.add(User(email="a@x", role=TenantRole.OWNER, disabled_at=now))
    assert used(database, acme, Resource.KEYS) == 1
    with database.transaction(acme.id) as session:
        quotas.check_room(session, Resource.USERS)
        with pytest.raises(QuotaExceeded, match="1 keys"):
            quotas.check_room(session, Resource.KEYS)
        session.add(User(email="b@x", role=TenantRole.OWNER))
        session.flush()
        with pytest.raises(QuotaExceeded, match="1 users"):
            quotas.check_room(session, Resource.USERS)


def test_a_user_who_is_enabled_again_takes_a_place(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, users=1)
    with database.transaction(acme.id) as session:
        owner = caller_of(acme)
        first = users.add_user(session, "a@x.example", TenantRole.DEVELOPER, by=owner)
        users.disable_user(session, first.id, by=owner)
        second = users.add_user(session, "b@x.example", TenantRole.DEVELOPER, by=owner)
        with pytest.raises(QuotaExceeded, match="1 users"):
            users.enable_user(session, first.id, by=owner)
        users.disable_user(session, second.id, by=owner)
        users.enable_user(session, first.id, by=owner)
    assert used(database, acme, Resource.USERS) == 1


def _key(number: int, **columns: object) -> ApiKey:
    return ApiKey(
        id=f"key{number:09}",
        name="k",
        mac=bytes(32),
        secret_id="0" * 8,
        scopes=[],
        created_by="system:system",
        **columns,
    )


def test_another_tenants_things_count_for_nothing(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    limit(database, acme.id, adapters=0, stored_bytes=0, versions_per_adapter=0)
    push(database, bolt, "a", "one")
    assert used(database, acme, Resource.ADAPTERS) == 0
    assert used(database, acme, Resource.VERSIONS_PER_ADAPTER) == 0
    with pytest.raises(QuotaExceeded):
        push(database, acme, "a", "one")


def test_the_last_place_goes_to_one_of_many(database: Database, acme: Tenant) -> None:
    limit(database, acme.id, adapters=2, keys=2)
    barrier = Barrier(NUM_THREADS)

    def take(session: TenantSession, number: int) -> None:
        if number % 2:
            created = catalog.create_version(session, make_new_version(f"a{number}", f"{number}"))
            bring_to(session, created.version, VersionState.READY)
        else:
            quotas.check_room(session, Resource.KEYS)
            session.add(_key(number))

    def run(number: int) -> bool:
        barrier.wait()
        try:
            with database.transaction(acme.id) as session:
                take(session, number)
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        taken = list(threads.map(run, range(NUM_THREADS)))
    assert (sum(taken[::2]), sum(taken[1::2])) == (2, 2)
