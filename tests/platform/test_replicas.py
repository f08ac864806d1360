"""The replicas of a fleet: their leases, and who may renew them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest

from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidValue, ReplicaNotFound
from loraplex.platform.jobs.service import shared_now
from loraplex.platform.replicas import service as replicas
from loraplex.platform.replicas.address import parse_address
from loraplex.platform.replicas.models import Replica
from loraplex.platform.replicas.service import Renewal
from support.statements import recorded_statements

LEASE_SECONDS = 300.0


def add(database: Database, address: str) -> str:
    with database.platform_transaction() as session:
        return replicas.add(session, address).id


def make_renewal(
    replica_id: str, *, incarnation: str = "1", runtime_id: str = "runtime"
) -> Renewal:
    return Renewal(
        id=replica_id,
        incarnation=incarnation,
        base_id="base",
        runtime_id=runtime_id,
        state="ready",
        figures={"num_running": 3},
    )


def renew(
    database: Database, replica_id: str, *, incarnation: str = "1", runtime_id: str = "runtime"
) -> str | None:
    """The objection, if there is one."""
    renewal = make_renewal(replica_id, incarnation=incarnation, runtime_id=runtime_id)
    with database.platform_transaction() as session:
        return replicas.renew(session, [renewal], lease_seconds=LEASE_SECONDS)[replica_id]


def age(database: Database, replica_id: str, seconds: float) -> None:
    with database.platform_transaction() as session:
        row = session.get_one(Replica, replica_id)
        assert row.seen_at is not None
        row.seen_at -= timedelta(seconds=seconds)


def has_expired(database: Database, replica_id: str) -> bool:
    with database.platform_transaction(read_only=True) as session:
        row = session.get_one(Replica, replica_id)
        return replicas.has_expired(row, shared_now(session), LEASE_SECONDS)


def test_an_address_is_added_once(database: Database) -> None:
    assert add(database, "one:7070") == add(database, "one:7070")
    add(database, "[::1]:7070")
    with database.platform_transaction(read_only=True) as session:
        found = [row.address for row in replicas.list_replicas(session)]
    assert found == ["one:7070", "[::1]:7070"]


@pytest.mark.parametrize("address", ["one", ":7070", "one:port", "one:70700", "::1:7070", "a b:1"])
def test_a_malformed_address_is_refused(database: Database, address: str) -> None:
    with pytest.raises(InvalidValue):
        add(database, address)


def test_an_ipv6_address_is_in_brackets() -> None:
    assert parse_address("[fe80::1]:80") == ("fe80::1", 80)


def test_a_lease_holds_from_each_renewal_for_its_length(database: Database) -> None:
    replica_id = add(database, "one:7070")
    assert has_expired(database, replica_id)
    assert renew(database, replica_id) is None
    assert not has_expired(database, replica_id)
    age(database, replica_id, LEASE_SECONDS - 5)
    assert not has_expired(database, replica_id)
    assert renew(database, replica_id) is None
    age(database, replica_id, LEASE_SECONDS)
    assert has_expired(database, replica_id)


def test_an_agent_whose_lease_has_ended_serves_again_only_in_a_new_life(database: Database) -> None:
    replica_id = add(database, "one:7070")
    renew(database, replica_id, incarnation="1")
    age(database, replica_id, LEASE_SECONDS)
    assert renew(database, replica_id, incarnation="1") == "replica_fenced"
    assert renew(database, replica_id, incarnation="2") is None


def test_an_earlier_agent_does_not_replace_a_later_one(database: Database) -> None:
    replica_id = add(database, "one:7070")
    renew(database, replica_id, incarnation="2")
    assert renew(database, replica_id, incarnation="1") == "replica_replaced"
    age(database, replica_id, LEASE_SECONDS)  # its clock may have been set back
    assert renew(database, replica_id, incarnation="1") is None


def test_a_replica_serves_what_the_others_serve_while_they_live(database: Database) -> None:
    first, second = add(database, "one:7070"), add(database, "two:7070")
    renew(database, first, runtime_id="int8")
    assert renew(database, second, runtime_id="int4") == "replica_incompatible"
    assert renew(database, second, runtime_id="int8") is None
    age(database, second, LEASE_SECONDS)
    assert renew(database, first, incarnation="2", runtime_id="int4") is None


def test_a_hundred_leases_are_renewed_with_a_few_statements(database: Database) -> None:
    ids = [add(database, f"agent-{number}:7070") for number in range(100)]
    renewals = [make_renewal(replica_id) for replica_id in ids]
    for _ in range(2):
        with database.platform_transaction() as session:
            with recorded_statements(session) as statements:
                refusals = replicas.renew(session, renewals, lease_seconds=LEASE_SECONDS)
                session.flush()
            assert refusals == dict.fromkeys(ids)
            assert len(statements) <= 5


def test_of_two_first_agents_with_different_bases_one_joins(database: Database) -> None:
    first, second = add(database, "one:7070"), add(database, "two:7070")
    with ThreadPoolExecutor() as threads:
        with database.platform_transaction() as session:
            renewal = make_renewal(first, runtime_id="int8")
            refusals = replicas.renew(session, [renewal], lease_seconds=LEASE_SECONDS)
            other = threads.submit(renew, database, second, runtime_id="int4")
            wait([other], timeout=0.5)  # it would answer now if it did not wait for this one
        assert refusals[first] is None
        assert other.result() == "replica_incompatible"


def test_a_removed_replica_serves_no_longer(database: Database) -> None:
    replica_id = add(database, "one:7070")
    with database.platform_transaction() as session:
        replicas.remove(session, replica_id)
    assert renew(database, replica_id) == "replica_removed"
    with pytest.raises(ReplicaNotFound), database.platform_transaction() as session:
        replicas.remove(session, replica_id)
    with pytest.raises(ReplicaNotFound), database.platform_transaction() as session:
        replicas.set_draining(session, replica_id, is_draining=True)


def test_renewals_keep_an_operators_wish(database: Database) -> None:
    replica_id = add(database, "one:7070")
    with database.platform_transaction() as session:
        replicas.set_draining(session, replica_id, is_draining=True)
    renew(database, replica_id)
    with database.platform_transaction(read_only=True) as session:
        row = session.get_one(Replica, replica_id)
        assert (row.is_draining, row.figures) == (True, {"num_running": 3})


def test_a_moved_replica_keeps_its_id_and_a_taken_address_is_refused(database: Database) -> None:
    first, second = add(database, "one:7070"), add(database, "two:7070")
    with database.platform_transaction() as session:
        assert replicas.move(session, first, "three:7070").id == first
    with database.platform_transaction(read_only=True) as session:
        found = {row.id: row.address for row in replicas.list_replicas(session)}
    assert found == {first: "three:7070", second: "two:7070"}
    for address in ("two:7070", "no address"):
        with pytest.raises(InvalidValue), database.platform_transaction() as session:
            replicas.move(session, first, address)
    with pytest.raises(ReplicaNotFound), database.platform_transaction() as session:
        replicas.move(session, "unknown", "four:7070")


def test_a_replica_is_added_with_the_id_that_its_place_has(database: Database) -> None:
    with database.platform_transaction() as session:
        assert replicas.add(session, "one:7070", replica_id="place").id == "place"
