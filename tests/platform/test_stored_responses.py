"""Stored responses: conversations, who sees them, bounds and expiry."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import ConversationTooLarge, QuotaExceeded, ResponseNotFound
from loraplex.platform.responses import service
from loraplex.platform.tenants.models import Tenant
from support.stored_responses import conversation, principal_of, store


def test_a_conversation_is_what_following_the_links_gives(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    drawn, viewer = random.Random(5), principal_of(acme)
    parents: dict[str, str | None] = {}
    with database.transaction(bolt.id) as session:
        store(session, "foreign")
    with database.transaction(acme.id) as session:
        for number in range(40):
            parent = drawn.choice([None, *list(parents)[-5:]])
            store(session, f"r{number}", after=parent)
            parents[f"r{number}"] = parent
        for last in parents:
            expected, each = [last], parents[last]
            while each is not None:
                expected.insert(0, each)
                each = parents[each]
            assert conversation(session, viewer, last) == expected


def test_a_conversation_without_one_of_its_responses_is_not_found(
    database: Database, acme: Tenant
) -> None:
    viewer = principal_of(acme)
    with database.transaction(acme.id) as session:
        store(session, "a")
        store(session, "b", after="a")
        store(session, "c", after="b")
        service.remove(session, "b", viewer=viewer)
        with pytest.raises(ResponseNotFound, match="continues has been deleted"):
            conversation(session, viewer, "c")
        assert conversation(session, viewer, "a") == ["a"]
        assert service.get_response(session, "c", viewer=viewer).previous_id == "b"


def test_a_conversation_above_the_bound_is_refused(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_CONVERSATION_BYTES", 12)
    viewer = principal_of(acme)
    with database.transaction(acme.id) as session:
        store(session, "a", size=6)
        store(session, "b", after="a", size=6)
        store(session, "c", after="b", size=1)
        assert conversation(session, viewer, "b") == ["a", "b"]
        with pytest.raises(ConversationTooLarge):
            conversation(session, viewer, "c")


def test_another_tenants_response_is_not_found_and_cannot_be_continued(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    with database.transaction(bolt.id) as session:
        store(session, "foreign", days=1)
    with database.transaction(acme.id) as session:
        viewer = principal_of(acme)
        for ask in (service.get_response, service.remove):
            with pytest.raises(ResponseNotFound):
                ask(session, "foreign", viewer=viewer)
        store(session, "own", after="foreign", earlier=("foreign",), days=9)
        with pytest.raises(ResponseNotFound):
            conversation(session, viewer, "own")
    with database.transaction(bolt.id, read_only=True) as session:
        kept = service.get_response(session, "foreign", viewer=principal_of(bolt))
        assert kept.expires_at < utc_now() + timedelta(days=2)


def test_a_key_restricted_to_adapters_finds_its_own_only(database: Database, acme: Tenant) -> None:
    own = principal_of(acme, adapters=frozenset({"bot"}))
    other = principal_of(acme, adapters=frozenset({"bot"}), key_id="o" * 12)
    with database.transaction(acme.id) as session:
        store(session, "a")
        assert conversation(session, own, "a") == ["a"]
        with pytest.raises(ResponseNotFound):
            conversation(session, other, "a")
        assert conversation(session, principal_of(acme, key_id="o" * 12), "a") == ["a"]


def test_an_expired_response_is_not_found_and_is_removed(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        store(session, "old", days=-1)
        store(session, "new")
        with pytest.raises(ResponseNotFound):
            service.get_response(session, "old", viewer=principal_of(acme))
    with database.platform_transaction() as platform:
        assert service.count_expired_of_all_tenants(platform, utc_now()) == 1
        assert service.purge(platform, utc_now()) == 1
        assert service.purge(platform, utc_now()) == 0
    with database.transaction(acme.id, read_only=True) as session:
        service.get_response(session, "new", viewer=principal_of(acme))


def test_what_is_continued_is_kept_as_long_as_what_continues_it(
    database: Database, acme: Tenant
) -> None:
    viewer = principal_of(acme)
    with database.transaction(acme.id) as session:
        store(session, "a", days=1)
        store(session, "long", days=20)
        store(session, "b", after="a", earlier=("a", "long"), days=9)
    with database.transaction(acme.id, read_only=True) as session:
        days = {
            name: (service.get_response(session, name, viewer=viewer).expires_at - utc_now()).days
            for name in ("a", "b", "long")
        }
    assert days == {"a": 8, "b": 8, "long": 19}


@pytest.mark.parametrize(("name", "limit"), [("MAX_RESPONSES", 2), ("MAX_TENANT_BYTES", 25)])
def test_the_responses_of_a_tenant_are_bounded(
    database: Database,
    acme: Tenant,
    bolt: Tenant,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    limit: int,
) -> None:
    monkeypatch.setattr(service, name, limit)
    with database.transaction(acme.id) as session:
        service.check_room(session, 10)
        store(session, "a")
        service.check_room(session, 10)
        store(session, "b")
        with pytest.raises(QuotaExceeded):
            service.check_room(session, 10)
        service.remove(session, "a", viewer=principal_of(acme))
        service.check_room(session, 10)
    with database.transaction(bolt.id, read_only=True) as session:
        service.check_room(session, 10)
