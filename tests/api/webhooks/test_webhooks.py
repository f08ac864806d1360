"""Webhooks through a server: routes, events of adapters and batches, and kills of the server."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from standardwebhooks import Webhook

from loraplex.adapters.failpoints import VARIABLE, WEBHOOK_FAILPOINTS
from loraplex.platform.models import AuditEntry, WebhookDelivery, WebhookEndpoint
from support.batches import completions, create, ended, jsonl
from support.command import Command
from support.envelopes import check_envelope
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, serving
from support.waiting import wait_for
from support.webhooks import Receiver, answer

_numbers = count(1)


def webhook_environment(receiver: Receiver, authority: Path) -> dict[str, str]:
    return {
        "LORAPLEX_WEBHOOK_HOSTS": f"localhost:{receiver.port}, hooks.acme.example",
        "LORAPLEX_WEBHOOK_NETWORKS": "127.0.0.0/8",
        "SSL_CERT_FILE": str(authority / "authority.pem"),
    }


@pytest.fixture(scope="module")
def hooked(
    tiny_base: Path,
    receiver: Receiver,
    authority: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerUnderTest]:
    """A server that may send webhooks to the receiver."""
    environment = webhook_environment(receiver, authority)
    folder = tmp_path_factory.mktemp("hooked")
    with serving(tiny_base, folder, "--served-model-name", "tiny", **environment) as running:
        yield running


@pytest.fixture
def owner(hooked: ServerUnderTest) -> Caller:
    return hooked.make_caller(f"hooked-{next(_numbers)}")


def add(caller: Caller, url: str, **body: Any) -> dict[str, Any]:
    added = caller.http.post("/v1/webhooks", json={"url": url, **body})
    assert added.status_code == 201, added.text
    view: dict[str, Any] = added.json()
    return view


def deliveries(caller: Caller, webhook: dict[str, Any], **query: str) -> list[dict[str, Any]]:
    found = caller.http.get(f"/v1/webhooks/{webhook['id']}/deliveries", params=query)
    data: list[dict[str, Any]] = found.raise_for_status().json()["data"]
    return data


def test_a_webhook_is_created_changed_and_deleted(hooked: ServerUnderTest, owner: Caller) -> None:
    url = "https://Hooks.Acme.example?token=x"
    created = add(owner, url, events=["version.ready"], description="CI")
    assert created["url"] == "https://hooks.acme.example/?token=x"
    assert created["secret"].startswith("whsec_")
    path = f"/v1/webhooks/{created['id']}"
    shown = owner.http.get(path)
    assert shown.json() == {key: value for key, value in created.items() if key != "secret"}
    assert owner.http.get("/v1/webhooks").json()["data"] == [shown.json()]
    change = {"events": None, "description": None, "disabled": True}
    stale = owner.http.patch(path, json=change, headers={"if-match": '"other"'})
    check_envelope(stale, "etag_mismatch")
    changed = owner.http.patch(path, json=change, headers={"if-match": shown.headers["etag"]})
    assert changed.json()["events"] is None
    assert changed.json()["description"] is None
    assert changed.json()["disabled_by"] == "caller"
    check_envelope(owner.http.post(f"{path}/test"), "state_conflict")
    enabled = owner.http.patch(path, json={"disabled": False}).json()
    assert (enabled["disabled_at"], enabled["disabled_by"]) == (None, None)
    assert owner.http.delete(path).status_code == 204
    check_envelope(owner.http.get(path), "webhook_not_found")
    check_envelope(owner.http.delete(path), "webhook_not_found")
    database = hooked.database
    with database.transaction(owner.tenant_id, read_only=True) as session:
        entries = list(session.scalars(select(AuditEntry).order_by(AuditEntry.number)))
        assert session.scalars(select(WebhookEndpoint)).all() == []
        assert session.scalars(select(WebhookDelivery)).all() == []
    database.close()
    assert [entry.action for entry in entries] == [
        *("webhook.create", "webhook.change", "webhook.change", "webhook.delete")
    ]
    assert all(entry.resource == created["id"] for entry in entries)
    assert "token" not in str([entry.details for entry in entries])


def test_urls_that_are_not_allowed_are_refused(owner: Caller) -> None:
    for url, code in (
        ("http://hooks.acme.example/", "webhook_url_invalid"),
        ("https://127.0.0.1/", "webhook_url_invalid"),
        ("https://u:p@hooks.acme.example/", "webhook_url_invalid"),
        ("https://evil.example/", "webhook_host_not_allowed"),
        ("https://hooks.acme.example:8443/", "webhook_host_not_allowed"),
    ):
        check_envelope(owner.http.post("/v1/webhooks", json={"url": url}), code, "url")
    webhook = add(owner, "https://hooks.acme.example/")
    answered = owner.http.patch(
        f"/v1/webhooks/{webhook['id']}", json={"url": "https://evil.example/"}
    )
    check_envelope(answered, "webhook_host_not_allowed", "url")


def test_without_hosts_no_webhook_can_be_created(caller: Caller) -> None:
    answered = caller.http.post("/v1/webhooks", json={"url": "https://hooks.acme.example/"})
    check_envelope(answered, "webhook_host_not_allowed", "url")


def test_a_test_event_arrives_and_is_listed(owner: Caller, receiver: Receiver) -> None:
    webhook = add(owner, receiver.url("/test"), events=["batch.ended"])
    sent = owner.http.post(f"/v1/webhooks/{webhook['id']}/test")
    assert sent.status_code == 202
    wait_for(lambda: deliveries(owner, webhook, state="delivered"))
    (delivery,) = deliveries(owner, webhook)
    assert delivery["event"] == sent.json()["event"]
    assert (delivery["type"], delivery["attempts"]) == ("webhook.test", 1)
    assert (delivery["last_status"], delivery["next_attempt_at"]) == (204, None)
    (event,) = receiver.events_at("/test")
    assert event["data"] == {"webhook": webhook["id"]}
    assert deliveries(owner, webhook, state="failed") == []


def test_a_failure_is_shown(owner: Caller, receiver: Receiver) -> None:
    receiver.respond["/moved"] = answer(b"HTTP/1.1 302 Found\r\nlocation: /test")
    webhook = add(owner, receiver.url("/moved"))
    owner.http.post(f"/v1/webhooks/{webhook['id']}/test").raise_for_status()
    wait_for(lambda: deliveries(owner, webhook)[0]["last_failure"])
    (delivery,) = deliveries(owner, webhook)
    assert (delivery["last_failure"], delivery["last_status"]) == ("redirect", 302)
    assert owner.http.get(f"/v1/webhooks/{webhook['id']}").json()["failing_since"] is not None


def test_a_rotated_secret_signs_with_the_old_one(owner: Caller, receiver: Receiver) -> None:
    webhook = add(owner, receiver.url("/rotated"))
    rotated = owner.http.post(f"/v1/webhooks/{webhook['id']}/rotate", json={}).json()
    assert rotated["secret"] != webhook["secret"]
    assert rotated["previous_secret_until"] is not None
    owner.http.post(f"/v1/webhooks/{webhook['id']}/test").raise_for_status()
    wait_for(lambda: receiver.events_at("/rotated"))
    (request,) = [each for each in receiver.received if each.path == "/rotated"]
    for secret in (webhook["secret"], rotated["secret"]):
        Webhook(secret).verify(request.body, request.headers)


def test_a_repeated_creation_returns_the_same_secret(owner: Caller) -> None:
    headers = {"idempotency-key": "one"}
    body = {"url": "https://hooks.acme.example/"}
    first, second = (
        owner.http.post("/v1/webhooks", json=body, headers=headers).json() for _ in range(2)
    )
    assert first == second
    assert len(owner.http.get("/v1/webhooks").json()["data"]) == 1


def test_adapters_and_batches_are_reported(
    owner: Caller, receiver: Receiver, adapters: list[Path]
) -> None:
    webhook = add(owner, receiver.url("/life"))
    version = owner.push(adapters[0], "bot", aliases=["prod"])
    batch = ended(owner.openai, create(owner.openai, jsonl(completions("bot", ["x"]))).id)
    owner.http.delete("/v1/adapters/bot").raise_for_status()
    wait_for(lambda: len(receiver.events_at("/life")) == 5)
    events = {
        (event["type"], event["data"].get("action")): event["data"]
        for event in receiver.events_at("/life")
    }
    digest = version["digest"]
    assert events["version.ready", None] == {"adapter": "bot", "version": 1, "digest": digest}
    assert events["alias.changed", "set"]["version"] == 1
    assert events["alias.changed", "remove"]["version"] is None
    assert events["batch.ended", None] == {
        "batch": batch.id,
        "state": "completed",
        "lines": 1,
        "completed": 1,
        "failed": 0,
        "output_file": batch.output_file_id,
        "error_file": None,
    }
    deleted = events["version.deleted", None]
    assert deleted["digest"] == digest
    receipt = owner.http.get("/v1/adapters/bot/deletions").json()["data"][0]
    assert deleted["receipt"] == receipt["receipt"]
    for request in receiver.received:
        if request.path == "/life":
            Webhook(webhook["secret"]).verify(request.body, request.headers)


def test_the_command_does_the_same(
    owner: Caller,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Command(monkeypatch, capsys, owner, "webhooks")
    code, secret, _ = run("create", receiver.url("/command"), "--event", "version.ready")
    assert (code, secret[:6]) == (0, "whsec_")
    (webhook,) = run.ask("list")
    assert (webhook["url"], webhook["events"]) == (receiver.url("/command"), ["version.ready"])
    event = run.ask("test", webhook["id"])["event"]
    wait_for(lambda: run.ask("deliveries", webhook["id"], "--state", "delivered"))
    assert [each["id"] for each in receiver.events_at("/command")] == [event]
    changed = run.ask("update", webhook["id"], "--all-events", "--description", "x", "--disable")
    assert (changed["events"], changed["description"]) == (None, "x")
    assert changed["disabled_by"] == "caller"
    assert run.ask("update", webhook["id"], "--enable") == run.ask("show", webhook["id"])
    assert run("rotate", webhook["id"], "--overlap-seconds", "0")[1] != secret
    code, out, _ = run("list")
    assert (code, webhook["id"] in out) == (0, True)
    assert run("rm", webhook["id"])[:2] == (0, f"removed {webhook['id']}\n")
    code, _, err = run("create", "https://evil.example/")
    assert code != 0
    assert "evil.example" in err


def test_the_deletion_of_the_tenant_is_reported_before_its_webhooks_go(
    hooked: ServerUnderTest, owner: Caller, receiver: Receiver
) -> None:
    add(owner, receiver.url("/leaving"))
    headers = {"authorization": f"Bearer {hooked.make_operator('hooked-remover')}"}
    with httpx.Client(base_url=hooked.url, headers=headers) as http:
        http.delete(
            f"/admin/tenants/{owner.slug}", params={"confirm": owner.slug}
        ).raise_for_status()
    wait_for(lambda: receiver.events_at("/leaving"), seconds=60)
    (event,) = receiver.events_at("/leaving")
    assert (event["type"], event["data"]["tenant"]) == ("tenant.deleted", owner.slug)


NUM_EVENTS = 20


def send_tests(caller: Caller, webhook: dict[str, Any]) -> set[str]:
    """The ids of many test events."""
    path = f"/v1/webhooks/{webhook['id']}/test"
    sent = [caller.http.post(path).raise_for_status() for _ in range(NUM_EVENTS)]
    return {each.json()["event"] for each in sent}


def check_all_arrive(
    tiny_base: Path,
    folder: Path,
    environment: dict[str, str],
    arrived: Callable[[], set[str]],
    sent: set[str],
) -> None:
    """A restarted server sends the rest."""
    with serving(tiny_base, folder, engine=FAKE_ENGINE, **environment):
        wait_for(lambda: arrived() == sent, seconds=60)


@pytest.mark.slow
def test_every_event_survives_a_kill_of_the_server(
    tiny_base: Path, tmp_path: Path, receiver: Receiver, authority: Path
) -> None:
    environment = webhook_environment(receiver, authority)

    def arrived() -> set[str]:
        return {event["id"] for event in receiver.events_at("/killed")}

    with serving(tiny_base, tmp_path, engine=FAKE_ENGINE, **environment) as server:
        caller = server.make_caller("acme")
        sent = send_tests(caller, add(caller, receiver.url("/killed")))
        wait_for(arrived)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
        assert arrived() < sent
    check_all_arrive(tiny_base, tmp_path, environment, arrived, sent)


@pytest.mark.slow
@pytest.mark.parametrize("point", WEBHOOK_FAILPOINTS)
def test_a_kill_between_two_effects_of_a_delivery_loses_no_event(
    tiny_base: Path, tmp_path: Path, receiver: Receiver, authority: Path, point: str
) -> None:
    environment = webhook_environment(receiver, authority)
    path = f"/{point}"

    def arrived() -> set[str]:
        return {event["id"] for event in receiver.events_at(path)}

    armed = {**environment, VARIABLE: point}
    with serving(tiny_base, tmp_path, engine=FAKE_ENGINE, **armed) as server:
        caller = server.make_caller("acme")
        webhook = add(caller, receiver.url(path))
        sent = {caller.http.post(f"/v1/webhooks/{webhook['id']}/test").json()["event"]}
        assert server.process.wait(60) == -signal.SIGKILL
    check_all_arrive(tiny_base, tmp_path, environment, arrived, sent)
