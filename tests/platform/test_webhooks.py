"""Webhooks and their outbox: what is announced, who sends it, when it is tried again."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from standardwebhooks import Webhook, WebhookVerificationError

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.errors import InvalidTransition, QuotaExceeded, WebhookNotFound
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants.models import Tenant
from loraplex.platform.webhooks import outbox, service
from loraplex.platform.webhooks.event_types import DeliveryState, DisabledBy, EventType, Failure
from loraplex.platform.webhooks.models import WebhookDelivery, WebhookEndpoint
from loraplex.platform.webhooks.outbox import Attempt, announce
from loraplex.platform.webhooks.service import WebhookService
from loraplex.platform.webhooks.signing import SigningSecrets
from support.catalog import make_version

SECRETS = [b"a" * 32, b"b" * 32]
SERVICE = WebhookService(SigningSecrets(SECRETS[:1]))
URL = "https://hooks.example.com/"


def add(
    session: TenantSession, *events: EventType, secrets: WebhookService = SERVICE
) -> tuple[str, str]:
    """A webhook's id and secret."""
    issued = secrets.create(
        session, url=URL, events=events or None, description=None, created_by="key:test"
    )
    return issued.endpoint.id, issued.text


def webhook_of(database: Database, tenant: Tenant, *events: EventType) -> str:
    with database.transaction(tenant.id) as session:
        return add(session, *events)[0]


def announce_one(database: Database, tenant: Tenant, number: int = 0) -> None:
    with database.transaction(tenant.id) as session:
        announce(session, tenant.id, EventType.BUDGET_ALERT, {"number": number})


def claim_all(database: Database, server_id: str = "one", per_endpoint: int = 100) -> list[Attempt]:
    with database.platform_transaction() as session:
        due = outbox.list_due(session, per_endpoint)
        return outbox.claim(session, [each.delivery_id for each in due], server_id)


def make_due(database: Database, **values: Any) -> None:
    """Let the time pass until all pending deliveries are due."""
    with database.platform_transaction() as session:
        values = {"due_at": utc_now() - timedelta(seconds=1), **values}
        session.execute(update(WebhookDelivery).values(**values))


def rows(database: Database, tenant: Tenant) -> list[WebhookDelivery]:
    with database.transaction(tenant.id, read_only=True) as session:
        order = (WebhookDelivery.created_at, WebhookDelivery.id)
        return list(session.scalars(select(WebhookDelivery).order_by(*order)))


def test_an_event_is_added_for_each_webhook_that_wants_its_type(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    everything = webhook_of(database, acme)
    budgets = webhook_of(database, acme, EventType.BUDGET_ALERT)
    webhook_of(database, acme, EventType.BATCH_ENDED)
    webhook_of(database, bolt)
    announce_one(database, acme, 7)
    found = rows(database, acme)
    assert {each.endpoint_id for each in found} == {everything, budgets}
    assert len({each.event_id for each in found}) == 1
    event = json.loads(found[0].body)
    assert event["id"] == found[0].event_id
    assert (event["type"], event["data"]) == ("budget.alert", {"number": 7})
    assert datetime.fromisoformat(event["timestamp"]).tzinfo == UTC
    assert rows(database, bolt) == []


def test_an_event_is_added_only_with_what_it_reports(database: Database, acme: Tenant) -> None:
    webhook_of(database, acme)
    with database.transaction(acme.id) as session:
        announce(session, acme.id, EventType.BUDGET_ALERT, {})
        session.rollback()
    assert rows(database, acme) == []


def test_the_platform_can_announce_for_a_tenant(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    webhook_of(database, acme)
    webhook_of(database, bolt)
    with database.platform_transaction() as session:
        announce(session, acme.id, EventType.BUDGET_ALERT, {})
    assert len(rows(database, acme)) == 1
    assert rows(database, bolt) == []


def test_versions_and_aliases_are_announced(database: Database, acme: Tenant) -> None:
    webhook_of(database, acme)
    with database.transaction(acme.id) as session:
        one = make_version(session, "bot", "one")
        make_version(session, "bot", "two")
        rejected = make_version(session, "bot", "three", state=VersionState.REJECTED)
        catalog.set_alias(session, "bot", "prod", 1, changed_by="key:k")
        canary = catalog.Canary(2, 10)
        catalog.set_alias(session, "bot", "prod", 1, canary=canary, changed_by="key:k")
        catalog.rollback_alias(session, "bot", "prod", changed_by="key:k")
        catalog.set_alias(session, "bot", "prod", 1)  # changes nothing
        catalog.remove_alias(session, "bot", "prod", changed_by="key:k")
        deletion = catalog.begin_version_deletion(session, "bot", 1)
        catalog.finish_deletion(session, deletion.version_id, receipt={"disk": "removed"})
    events = [json.loads(row.body) for row in rows(database, acme)]
    seen = [(event["type"], event["data"].get("action")) for event in events]
    assert seen == [
        *[("version.ready", None)] * 2,
        ("version.rejected", None),
        *[("alias.changed", action) for action in ("set", "canary", "rollback", "remove")],
        ("version.deleted", None),
    ]
    assert events[0]["data"] == {"adapter": "bot", "version": 1, "digest": one.digest}
    assert events[2]["data"]["reason"] == rejected.reason_code
    assert events[4]["data"] == {
        "adapter": "bot",
        "alias": "prod",
        "action": "canary",
        "version": 1,
        "canary": {"version": 2, "percent": 10.0},
        "changed_by": "key:k",
        "reason": None,
    }
    assert events[6]["data"]["version"] is None
    assert events[7]["data"]["receipt"] == {"disk": "removed"}
    assert events[7]["data"]["digest"] == one.digest


def test_a_due_delivery_is_claimed_by_one_server(database: Database, acme: Tenant) -> None:
    webhook_of(database, acme)
    announce_one(database, acme)
    (attempt,) = claim_all(database)
    assert (attempt.number, attempt.endpoint.url) == (1, URL)
    assert claim_all(database, "other") == []
    make_due(database)  # the server is taken for stopped
    (second,) = claim_all(database, "other")
    assert (second.delivery.id, second.number) == (attempt.delivery.id, 2)


def test_a_restarted_server_takes_its_own_deliveries_at_once(
    database: Database, acme: Tenant
) -> None:
    webhook_of(database, acme)
    announce_one(database, acme)
    claim_all(database, "one")
    with database.platform_transaction() as session:
        outbox.recover(session, "other")
    assert claim_all(database, "one") == []
    with database.platform_transaction() as session:
        outbox.recover(session, "one")
    assert len(claim_all(database, "one")) == 1


def test_a_result_of_an_earlier_attempt_changes_nothing(database: Database, acme: Tenant) -> None:
    webhook_of(database, acme)
    announce_one(database, acme)
    (first,) = claim_all(database, "one")
    make_due(database)
    (second,) = claim_all(database, "other")
    with database.transaction(acme.id) as session:
        outbox.note_delivered(session, first, 200)
        outbox.note_failed(session, first, Failure.TIMEOUT, None)
        outbox.put_back(session, first)
    assert rows(database, acme)[0].state is DeliveryState.PENDING
    with database.transaction(acme.id) as session:
        outbox.note_delivered(session, second, 204)
        outbox.note_failed(session, second, Failure.TIMEOUT, None)
    (row,) = rows(database, acme)
    assert (row.state, row.last_status, row.server_id) == (DeliveryState.DELIVERED, 204, None)


def test_a_failed_attempt_is_repeated_with_growing_pauses(database: Database, acme: Tenant) -> None:
    webhook_id = webhook_of(database, acme)
    announce_one(database, acme)
    for number in range(1, outbox.MAX_ATTEMPTS + 1):
        make_due(database)
        (attempt,) = claim_all(database)
        before = utc_now()
        with database.transaction(acme.id) as session:
            assert outbox.note_failed(session, attempt, Failure.STATUS, 503) is None
        (row,) = rows(database, acme)
        pause = min(timedelta(seconds=2) * 2 ** (number - 1), timedelta(hours=6))
        assert 0.75 * pause < row.due_at - before < 1.25 * pause
        assert row.last_failure == "status"
        is_last = number == outbox.MAX_ATTEMPTS
        assert (row.state is DeliveryState.FAILED) == is_last
    make_due(database)
    assert claim_all(database) == []
    with database.transaction(acme.id, read_only=True) as session:
        assert service.get_webhook(session, webhook_id).failing_since is not None


def test_pauses_differ_by_chance() -> None:
    assert len({outbox.pause_after(5) for _ in range(20)}) == 20
    assert max(outbox.pause_after(10_000) for _ in range(20)) <= 1.2 * outbox.MAX_PAUSE


def test_what_an_endpoint_wants_makes_a_pause_longer_within_bounds() -> None:
    hour, year = timedelta(hours=1), timedelta(days=365)
    assert all(hour <= outbox.pause_after(1, hour) <= 1.2 * hour for _ in range(20))
    assert max(outbox.pause_after(1, year) for _ in range(20)) <= 1.2 * outbox.MAX_PAUSE
    assert min(outbox.pause_after(10, timedelta(0)) for _ in range(20)) > 0.7 * 512 * (
        outbox.FIRST_PAUSE
    )


def test_old_events_are_not_sent(database: Database, acme: Tenant) -> None:
    webhook_of(database, acme)
    announce_one(database, acme)
    make_due(database, created_at=utc_now() - outbox.MAX_AGE)
    assert claim_all(database) == []
    with database.platform_transaction() as session:
        assert outbox.purge(session) == 0
    assert rows(database, acme)[0].state is DeliveryState.FAILED
    make_due(database, created_at=utc_now() - outbox.KEPT_FOR - timedelta(seconds=5))
    with database.platform_transaction() as session:
        assert outbox.purge(session) == 1
    assert rows(database, acme) == []


def test_a_webhook_that_fails_for_two_days_is_disabled(database: Database, acme: Tenant) -> None:
    webhook_id = webhook_of(database, acme)
    announce_one(database, acme)
    (attempt,) = claim_all(database)
    with database.transaction(acme.id) as session:
        endpoint = service.get_webhook(session, webhook_id)
        endpoint.failing_since = utc_now() - outbox.DISABLED_AFTER
    with database.transaction(acme.id) as session:
        disabled_by = outbox.note_failed(session, attempt, Failure.TIMEOUT, None)
    assert disabled_by is DisabledBy.FAILURES
    make_due(database)
    announce_one(database, acme)
    assert len(rows(database, acme)) == 1
    assert claim_all(database) == []
    with database.transaction(acme.id) as session:
        with pytest.raises(InvalidTransition):
            service.send_test(session, webhook_id)
        service.enable(service.get_webhook_to_change(session, webhook_id))
    assert len(claim_all(database)) == 1


def test_success_ends_a_row_of_failures(database: Database, acme: Tenant) -> None:
    webhook_id = webhook_of(database, acme)
    announce_one(database, acme)
    (attempt,) = claim_all(database)
    with database.transaction(acme.id) as session:
        outbox.note_failed(session, attempt, Failure.TIMEOUT, None)
    make_due(database)
    (attempt,) = claim_all(database)
    with database.transaction(acme.id) as session:
        outbox.note_delivered(session, attempt, 200)
    with database.transaction(acme.id, read_only=True) as session:
        assert service.get_webhook(session, webhook_id).failing_since is None


def test_a_receiver_that_is_gone_is_disabled_at_once(database: Database, acme: Tenant) -> None:
    webhook_of(database, acme)
    announce_one(database, acme)
    (attempt,) = claim_all(database)
    with database.transaction(acme.id) as session:
        disabled_by = outbox.note_failed(session, attempt, Failure.GONE, 410)
    assert disabled_by is DisabledBy.RECEIVER
    assert rows(database, acme)[0].state is DeliveryState.FAILED


def test_a_crowded_webhook_is_claimed_in_parts(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    crowded, other = webhook_of(database, acme), webhook_of(database, bolt)
    for number in range(5):
        announce_one(database, acme, number)
    announce_one(database, bolt)
    with database.platform_transaction(read_only=True) as session:
        due = [each.endpoint_id for each in outbox.list_due(session, 2)]
    assert due == [crowded, other, crowded]


def test_pending_events_are_bounded_and_dropped_ones_counted(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING", 2)
    webhook_id = webhook_of(database, acme)
    for number in range(5):
        announce_one(database, acme, number)
    assert len(rows(database, acme)) == 2
    with database.transaction(acme.id) as session:
        assert service.get_webhook(session, webhook_id).num_dropped == 3
        with pytest.raises(QuotaExceeded):
            service.send_test(session, webhook_id)


def test_an_event_that_is_dropped_counts_beside_those_that_others_drop_meanwhile(
    database: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_PENDING", 0)
    webhook_id = webhook_of(database, acme)
    with database.platform_transaction() as session:
        read_before = session.get_one(WebhookEndpoint, webhook_id)
        others = update(WebhookEndpoint).values(num_dropped=5)
        session.execute(others, execution_options={"synchronize_session": False})
        announce(session, acme.id, EventType.BUDGET_ALERT, {})
        session.refresh(read_before)
        assert read_before.num_dropped == 6


def test_a_tenant_has_a_bounded_number_of_webhooks(
    database: Database, acme: Tenant, bolt: Tenant
) -> None:
    for _ in range(service.MAX_WEBHOOKS):
        webhook_of(database, acme)
    with pytest.raises(QuotaExceeded):
        webhook_of(database, acme)
    webhook_of(database, bolt)


def test_a_deleted_webhook_leaves_nothing(database: Database, acme: Tenant, bolt: Tenant) -> None:
    webhook_id, kept = webhook_of(database, acme), webhook_of(database, acme)
    announce_one(database, acme)
    (_, attempt) = sorted(claim_all(database), key=lambda each: each.endpoint.id == webhook_id)
    with database.transaction(bolt.id) as session, pytest.raises(WebhookNotFound):
        service.remove(session, webhook_id)
    with database.transaction(acme.id) as session:
        service.remove(session, webhook_id)
    assert {row.endpoint_id for row in rows(database, acme)} == {kept}
    with database.transaction(acme.id) as session:
        outbox.note_delivered(session, attempt, 200)  # it was being sent
        with pytest.raises(WebhookNotFound):
            service.get_webhook(session, webhook_id)


# --- signatures -----------------------------------------------------------------------------------


def signed(
    database: Database, tenant: Tenant, webhook_id: str, secrets: list[bytes]
) -> dict[str, str] | None:
    with database.transaction(tenant.id, read_only=True) as session:
        endpoint = service.get_webhook(session, webhook_id)
        return SigningSecrets(secrets).sign(endpoint, "evt_1", b"{}", utc_now())


def test_signatures_hold_for_the_secret_that_was_shown(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        webhook_id, secret = add(session)
    headers = signed(database, acme, webhook_id, SECRETS[:1])
    assert headers is not None
    Webhook(secret).verify(b"{}", headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(b"{ }", headers)
    with database.transaction(acme.id, read_only=True) as session:
        stored = session.get_one(WebhookEndpoint, webhook_id).secret
    assert secret.removeprefix("whsec_").encode() not in stored


def test_both_secrets_sign_while_one_is_replaced(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        webhook_id, old = add(session)
        new = SERVICE.rotate(session, webhook_id, timedelta(hours=1)).text
    headers = signed(database, acme, webhook_id, SECRETS[:1])
    assert headers is not None
    Webhook(old).verify(b"{}", headers)
    Webhook(new).verify(b"{}", headers)
    with database.transaction(acme.id) as session:
        newest = SERVICE.rotate(session, webhook_id, timedelta(0)).text
    headers = signed(database, acme, webhook_id, SECRETS[:1])
    assert headers is not None
    Webhook(newest).verify(b"{}", headers)
    for secret in (old, new):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(b"{}", headers)


def test_an_overlap_ends(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        webhook_id, old = add(session)
        SERVICE.rotate(session, webhook_id, timedelta(hours=1))
        service.get_webhook(session, webhook_id).previous_until = utc_now()
    headers = signed(database, acme, webhook_id, SECRETS[:1])
    assert headers is not None
    with pytest.raises(WebhookVerificationError):
        Webhook(old).verify(b"{}", headers)
    with database.platform_transaction() as platform:
        assert SERVICE.reseal(platform) == 1
    with database.transaction(acme.id, read_only=True) as session:
        assert service.get_webhook(session, webhook_id).previous_secret is None


def test_secrets_follow_the_servers_secret(database: Database, acme: Tenant) -> None:
    with database.transaction(acme.id) as session:
        webhook_id, old = add(session)
        new = SERVICE.rotate(session, webhook_id, timedelta(hours=1)).text
    replaced = [SECRETS[1], SECRETS[0]]
    assert signed(database, acme, webhook_id, SECRETS[1:]) is None
    with database.platform_transaction() as platform:
        renewed = WebhookService(SigningSecrets(replaced))
        assert WebhookService(SigningSecrets(SECRETS[1:])).reseal(platform) == 1  # cannot be read
        assert renewed.reseal(platform) == 1
        assert renewed.reseal(platform) == 0
    assert signed(database, acme, webhook_id, SECRETS[:1]) is None
    headers = signed(database, acme, webhook_id, SECRETS[1:])
    assert headers is not None
    Webhook(old).verify(b"{}", headers)
    Webhook(new).verify(b"{}", headers)


def test_a_secret_of_one_webhook_is_none_of_another(database: Database, acme: Tenant) -> None:
    one, other = webhook_of(database, acme), webhook_of(database, acme)
    with database.transaction(acme.id) as session:
        service.get_webhook(session, one).secret = service.get_webhook(session, other).secret
    assert signed(database, acme, one, SECRETS[:1]) is None
