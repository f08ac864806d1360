"""Concurrent writers: the same result as in sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from time import sleep
from typing import TypeVar

import pytest
from sqlalchemy import select

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters import uploads, wishes
from loraplex.platform.adapters.canary import Canary, request_place
from loraplex.platform.adapters.registry import parse_model_name, resolve
from loraplex.platform.adapters.states import UploadState, VersionState, WishKind
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import (
    AdapterBeingDeleted,
    DatabaseBusy,
    InvalidTransition,
    NothingToRollBack,
    TenantExists,
    TooManyPins,
    UploadConflict,
    UserNotFound,
    VersionAliased,
    VersionNotFound,
)
from loraplex.platform.keys.principal import TenantRole
from loraplex.platform.keys.service import ApiKeyService
from loraplex.platform.overview import service as overview
from loraplex.platform.overview.models import AdapterUse
from loraplex.platform.overview.service import Gathered, UseSums
from loraplex.platform.quotas import service as quotas
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.usage import service as usage
from loraplex.platform.usage.repository import DeviceUsage, Group, UsageQuery
from loraplex.platform.usage.service import Usage
from loraplex.platform.users import service as users
from loraplex.platform.writer_queue import WriterQueue
from support.catalog import BASE_ID, make_digest, make_new_version, make_tenant, make_version
from support.databases import (
    empty_all_tables,
    wait_until_are_blocked,
    wait_until_one_is_blocked,
)
from support.identity import caller_of, peppers
from support.limits import SERVER_ID, limit, make_demand
from support.uploads import abandon_stale, make_upload

NUM_THREADS = 6
NUM_ROUNDS = 4
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)

Result = TypeVar("Result")


def at_the_same_time(work: Callable[[int], Result]) -> list[Result]:
    barrier = Barrier(NUM_THREADS)

    def run(number: int) -> Result:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(run, range(NUM_THREADS)))


def test_who_writes_to_sqlite_again_and_again_waits_for_those_who_came_before(
    sqlite_database: Database,
) -> None:
    order: list[int] = []

    def write(number: int) -> None:
        with sqlite_database.platform_transaction() as session:
            session.connection()
            order.append(number)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        with sqlite_database.platform_transaction() as session:
            session.connection()
            waiting = []
            for number in range(NUM_THREADS):
                waiting.append(threads.submit(write, number))
                sleep(0.05)  # they have come, and those who poll do so in long pauses
        write(NUM_THREADS)
        for each in waiting:
            each.result()
    assert order == [*range(NUM_THREADS), NUM_THREADS]


def test_a_writer_of_sqlite_that_waited_in_vain_holds_up_nobody() -> None:
    line = WriterQueue(patience_seconds=0.02)
    with ThreadPoolExecutor(1) as threads, line.wait():

        def write() -> None:
            with line.wait():
                pytest.fail("it is not its turn")

        with pytest.raises(DatabaseBusy):
            threads.submit(write).result()
    with line.wait():
        pass


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
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        finish_reason="stop",
    )

    def record(_: int) -> bool:
        with database.transaction(acme.id) as session:
            return usage.record(session, used)

    assert sum(at_the_same_time(record)) == 1


def make_usage(request_id: str, adapter_name: str) -> Usage:
    return Usage(
        request_id=request_id,
        adapter_name=adapter_name,
        adapter_version=1,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        finish_reason="stop",
        ended_at=NOON,
    )


def test_requests_and_residency_of_a_day_come_one_after_the_other(
    database: Database, acme: Tenant
) -> None:
    """Whatever the order of the contents' digests, which residency comes with."""
    low, high = sorted(("one content", "another"), key=make_digest)
    with database.transaction(acme.id) as session:
        make_version(session, "a", high)
        make_version(session, "b", low)
        usage.record(session, make_usage("first", "a"))
        usage.record(session, make_usage("second", "b"))

    def add_device_usage() -> None:
        residencies = [DeviceUsage(NOON.date(), make_digest(content), 7) for content in (low, high)]
        with database.transaction(acme.id) as session:
            usage.add_device_usage(session, residencies)

    with ThreadPoolExecutor(1) as threads:
        with database.transaction(acme.id) as session:
            usage.record(session, make_usage("third", "a"))
            adding = threads.submit(add_device_usage)
            wait_until_one_is_blocked(session)
            usage.record(session, make_usage("fourth", "b"))
        adding.result()
    with database.transaction(acme.id, read_only=True) as session:
        sums = usage.sum_usage(session, UsageQuery(groups=(Group.ADAPTER,)))
        assert [(entry.num_requests, entry.residency_byte_seconds) for entry in sums] == [
            (2, 7)
        ] * 2


def test_a_servers_renewal_does_not_wait_for_requests_that_are_being_settled(
    postgres_database: Database,
) -> None:
    """Else the two could wait for each other: one transaction settles several requests."""
    database = postgres_database
    empty_all_tables(database)
    acme = make_tenant(database, "acme")
    limit(database, acme.id, concurrent_requests=2)
    with database.transaction(acme.id) as session:
        for request_id in ("first", "second"):
            quotas.reserve(session, make_demand(request_id), server_id=SERVER_ID)

    def renew() -> int:
        with database.platform_transaction() as session:
            return quotas.renew(session, SERVER_ID)

    with ThreadPoolExecutor(1) as threads, database.transaction(acme.id) as session:
        quotas.release(session, "second")
        assert threads.submit(renew).result(timeout=60) == 1, "that of the first"
        quotas.release(session, "first")
    assert renew() == 0


def test_a_user_is_enabled_while_an_owner_gets_a_key(database: Database, acme: Tenant) -> None:
    """Both look at users and at the quota: in one order, or they wait for each other."""
    keys, caller = ApiKeyService(peppers("a")), caller_of(acme)
    limit(database, acme.id, keys=5, users=5)
    with database.transaction(acme.id) as session:
        owner = users.add_user(session, "owner@example.com", TenantRole.OWNER, by=caller)
        other = users.add_user(session, "other@example.com", TenantRole.VIEWER, by=caller)
        users.disable_user(session, other.id, by=caller)

    def issue() -> str:
        with database.transaction(acme.id) as session:
            return keys.issue(session, name="new", scopes=[], user_id=owner.id).text

    with ThreadPoolExecutor(1) as threads:
        with database.transaction(acme.id) as session:
            users.get_user_to_change(session, other.id)
            issuing = threads.submit(issue)
            wait_until_one_is_blocked(session)
            assert users.enable_user(session, other.id, by=caller).disabled_at is None
        assert issuing.result()


def test_no_key_of_a_user_is_made_while_the_user_is_disabled(
    database: Database, acme: Tenant
) -> None:
    """Neither anew nor as a successor: it would be good when the user is enabled again."""
    keys, caller = ApiKeyService(peppers("a")), caller_of(acme)
    with database.transaction(acme.id) as session:
        user = users.add_user(session, "user@example.com", TenantRole.VIEWER, by=caller)
        key = keys.issue(session, name="old", scopes=[], user_id=user.id).key

    def issue() -> None:
        with database.transaction(acme.id) as session, pytest.raises(UserNotFound):
            keys.issue(session, name="new", scopes=[], user_id=user.id)

    def rotate() -> None:
        with database.transaction(acme.id) as session, pytest.raises(InvalidTransition):
            keys.rotate(session, key.id, overlap=timedelta(0), issuer=caller)

    with ThreadPoolExecutor(2) as threads:
        with database.transaction(acme.id) as session:
            users.disable_user(session, user.id, by=caller)
            session.flush()
            making = [threads.submit(issue), threads.submit(rotate)]
            wait_until_are_blocked(session, 2)
            assert keys.revoke_keys_of_user(session, user.id) == 1
        for each in making:
            each.result()


def test_servers_that_note_the_use_of_the_same_adapters_lose_nothing(
    database: Database, acme: Tenant
) -> None:
    names = [f"bot-{number}" for number in range(20)]

    def note(number: int) -> None:
        order = names[number:] + names[:number]
        for _ in range(NUM_ROUNDS):
            uses = {(acme.id, name): UseSums(NOON, {"1": 1}) for name in order}
            with database.platform_transaction() as session:
                overview.add(session, f"server-{number}", NOON.timestamp(), Gathered(uses=uses))

    at_the_same_time(note)
    with database.transaction(acme.id, read_only=True) as session:
        counts = {
            row.adapter_name: row.latency_counts for row in session.scalars(select(AdapterUse))
        }
    assert counts == {name: {"1": NUM_THREADS * NUM_ROUNDS} for name in names}


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


NUM_FLIPS = 10
NUM_READS = 30
SPLITS = {(1, 2, 30.0), (3, 4, 70.0)}
"""Version, canary and percent of the two targets between which an alias flips."""


def right_answers(place: float) -> set[int]:
    """What a request at this place may be answered by: one version of each whole target."""
    return {canary if place < percent else main for main, canary, percent in SPLITS}


def test_an_alias_is_never_seen_half_flipped(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for number in range(1, 5):
            adapter_id = make_version(session, content=f"content {number}").adapter_id
        catalog.set_alias(session, "support-bot", "prod", 1, canary=Canary(2, 30))
    name = parse_model_name("support-bot")
    num_flips = 0
    readers_left = set(range(1, NUM_THREADS))

    def flip() -> set[tuple[float, int]]:
        nonlocal num_flips
        try:
            while readers_left:
                for main, canary, percent in sorted(SPLITS):
                    split = Canary(canary, percent)
                    with database.transaction(acme.id) as session:
                        catalog.set_alias(session, "support-bot", "prod", main, canary=split)
                num_flips += 1
        finally:
            num_flips += NUM_FLIPS  # the readers shall not wait for one that failed
        return set()

    def ask(reader: int) -> set[tuple[float, int]]:
        answers: set[tuple[float, int]] = set()
        number = 0
        try:
            while number < NUM_READS or num_flips < NUM_FLIPS:
                request_id, number = f"request-{reader}-{number}", number + 1
                with database.transaction(acme.id, read_only=True) as session:
                    meaning = resolve(session, name, tenant_slug="acme")
                    (alias,) = catalog.get_adapter(session, "support-bot").aliases
                assert alias.canary_version is not None
                split = (alias.version.number, alias.canary_version.number, alias.canary_percent)
                assert split in SPLITS
                reference = meaning.of(request_id, base_id=BASE_ID)
                answers.add((request_place(adapter_id, "prod", request_id), reference.version))
        finally:
            readers_left.discard(reader)
        return answers

    seen = set().union(*at_the_same_time(lambda number: ask(number) if number else flip()))
    assert {version for _, version in seen} == {1, 2, 3, 4}
    assert [
        (place, version) for place, version in seen if version not in right_answers(place)
    ] == []


def test_two_changes_of_an_alias_are_two_entries_of_its_history(
    database: Database, acme: Tenant
) -> None:
    with database.transaction(acme.id) as session:
        for number in range(NUM_THREADS):
            make_version(session, content=f"content {number}")

    def change(number: int) -> None:
        with database.transaction(acme.id) as session:
            catalog.set_alias(session, "support-bot", "prod", number + 1)

    at_the_same_time(change)
    with database.transaction(acme.id) as session:
        changes = list(catalog.list_alias_changes(session, "support-bot", "prod"))
        order = [change.version_number for change in reversed(changes)]
        assert sorted(number for number in order if number) == list(range(1, NUM_THREADS + 1))
        rolled_back = [
            catalog.rollback_alias(session, "support-bot", "prod").version.number
            for _ in range(NUM_THREADS - 1)
        ]
        assert rolled_back == order[-2::-1]
        with pytest.raises(NothingToRollBack):
            catalog.rollback_alias(session, "support-bot", "prod")


def test_what_an_alias_points_at_is_not_deleted_meanwhile(database: Database, acme: Tenant) -> None:
    for round_ in range(NUM_ROUNDS):
        name = f"bot-{round_}"
        with database.transaction(acme.id) as session:
            for content in ("main", "canary"):
                make_version(session, name, f"{content} {round_}")

        def alias_or_delete(number: int, name: str = name) -> str:
            try:
                with database.transaction(acme.id) as session:
                    if number % 2:
                        catalog.begin_version_deletion(session, name, 2)
                        return "deleted"
                    catalog.set_alias(session, name, "prod", 1, canary=Canary(2, 50))
                    return "aliased"
            except (VersionAliased, VersionNotFound):
                return "refused"

        outcomes = Counter(at_the_same_time(alias_or_delete))
        assert outcomes["deleted"] == (0 if outcomes["aliased"] else 1)
        with database.transaction(acme.id, read_only=True) as session:
            adapter = catalog.get_adapter(session, name)
            assert len(adapter.versions) == 1 + bool(adapter.aliases)


def test_the_limit_of_pins_holds(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        for number in range(NUM_THREADS):
            make_version(session, content=f"content {number}")

    def pin(number: int) -> bool:
        try:
            with database.transaction(acme.id) as session:
                wishes.set_wish(session, "support-bot", number + 1, WishKind.PIN, max_pins=2)
        except TooManyPins:
            return False
        return True

    assert sum(at_the_same_time(pin)) == 2
    with database.transaction(acme.id, read_only=True) as session:
        assert len(wishes.list_wishes(session, "support-bot")) == 2


def test_a_wish_that_is_removed_as_expired_can_be_renewed(database: Database, acme: Tenant) -> None:
    now = utc_now()
    with database.transaction(acme.id) as session:
        make_version(session)
        wishes.set_wish(session, "support-bot", 1, WishKind.PIN, ttl_seconds=1, now=now)

    def renew() -> None:
        with database.transaction(acme.id) as session:
            wishes.set_wish(session, "support-bot", 1, WishKind.PIN, now=now)

    with ThreadPoolExecutor(1) as threads:
        with database.platform_transaction() as platform:
            assert wishes.remove_expired(platform, now + timedelta(seconds=1)) == 1
            renewal = threads.submit(renew)
            wait_until_one_is_blocked(platform)
        renewal.result()
    with database.transaction(acme.id, read_only=True) as session:
        (wish,) = wishes.list_wishes(session, "support-bot")
        assert wish.expires_at is None


def test_a_stale_upload_is_either_abandoned_or_goes_on(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        upload_id = make_upload(session, size_bytes=100).id
    moment = utc_now()

    def abandon_or_advance(number: int) -> str:
        if number:
            return "abandoned" if abandon_stale(database, moment) else "nothing stale"
        try:
            with database.transaction(acme.id) as session:
                uploads.advance_upload(session, upload_id, offset=0, num_bytes=60)
        except InvalidTransition:
            return "too late"
        return "went on"

    outcomes = Counter(at_the_same_time(abandon_or_advance))
    assert outcomes["abandoned"] + outcomes["went on"] == 1
    with database.transaction(acme.id, read_only=True) as session:
        upload = uploads.get_upload(session, upload_id)
        went_on = bool(outcomes["went on"])
        assert (upload.state is UploadState.RECEIVING) == went_on
        assert upload.received_bytes == (60 if went_on else 0)
