"""Writers at the same moment: as if they had come one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import uploads
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.errors import AdapterBeingDeleted, TenantExists, UploadConflict
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage import service as usage
from loraplex.platform.usage.service import Usage
from support.catalog import make_digest, make_new_version, make_tenant, make_version
from support.uploads import make_upload

NUM_THREADS = 6
NUM_ROUNDS = 4

Result = TypeVar("Result")


def at_the_same_time(work: Callable[[int], Result]) -> list[Result]:
    barrier = Barrier(NUM_THREADS)

    def run(number: int) -> Result:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(run, range(NUM_THREADS)))


def test_gives_each_version_its_own_number(database: Database, acme: Tenant) -> None:
    def push(number: int) -> int:
        with database.transaction(acme.id) as session:
            return make_version(session, content=f"content {number}").number

    assert sorted(at_the_same_time(push)) == list(range(1, NUM_THREADS + 1))


def test_makes_one_version_of_the_same_content(database: Database, acme: Tenant) -> None:
    def push(_: int) -> tuple[str, bool]:
        with database.transaction(acme.id) as session:
            version, is_new = catalog.create_version(session, make_new_version())
            return version.id, is_new

    created = at_the_same_time(push)
    assert len({version_id for version_id, _ in created}) == 1
    assert sum(is_new for _, is_new in created) == 1


def test_makes_one_tenant_of_a_slug(database: Database) -> None:
    def create(_: int) -> str:
        try:
            return make_tenant(database, "acme").id
        except TenantExists:
            return "exists"

    assert Counter(at_the_same_time(create))["exists"] == NUM_THREADS - 1


def test_counts_a_request_once(database: Database, acme: Tenant) -> None:
    used = Usage(
        request_id="request-1",
        adapter=None,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        tier=None,
        finish_reason="stop",
    )

    def record(_: int) -> bool:
        with database.transaction(acme.id) as session:
            return usage.record(session, used)

    assert sum(at_the_same_time(record)) == 1


def test_acknowledges_each_byte_of_an_upload_once(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        upload_id = make_upload(session, size_bytes=100).id

    def advance(_: int) -> bool:
        try:
            with database.transaction(acme.id) as session:
                uploads.advance_upload(session, upload_id, offset=0, num_bytes=60)
        except UploadConflict:
            return False
        return True

    assert sum(at_the_same_time(advance)) == 1
    with database.transaction(acme.id, read_only=True) as session:
        assert uploads.get_upload(session, upload_id).received_bytes == 60


@pytest.mark.parametrize("round_", range(NUM_ROUNDS))
def test_content_is_never_pushed_and_removed_at_once(
    database: Database, acme: Tenant, round_: int
) -> None:
    """Either the deletion sees the new name, or the push is told to wait."""
    with database.transaction(acme.id) as session:
        make_version(session, "first")

    def delete_or_push(number: int) -> str:
        try:
            with database.transaction(acme.id) as session:
                if number == round_ % NUM_THREADS:
                    deletion = catalog.begin_version_deletion(session, "first", 1)
                    return "kept" if deletion.is_content_shared else "removed"
                make_version(session, f"other-{number}", state=VersionState.VALIDATED)
                return "pushed"
        except AdapterBeingDeleted:
            return "told to wait"

    outcomes = set(at_the_same_time(delete_or_push))
    with database.transaction(acme.id, read_only=True) as session:
        is_referenced = catalog.is_object_referenced(session, make_digest("weights"))
    assert is_referenced == ("pushed" in outcomes)
    assert ("removed" in outcomes) == ("pushed" not in outcomes)
