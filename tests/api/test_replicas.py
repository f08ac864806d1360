"""`/admin/replicas`: operators add, drain, resume and remove the replicas of a fleet."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import httpx
import msgspec
import pytest

from loraplex.api.routes.replica_views import replica_view
from loraplex.engine.fleet.handover_counts import HandoverFigures
from loraplex.engine.fleet.replica_view import ReplicaView
from loraplex.engine.messages import ErrorInfo, ReplicaRole, ReplicaState
from loraplex.platform.replicas.models import Replica
from support.envelopes import check_envelope
from support.server import ServerUnderTest

REPLICAS = "/admin/replicas"
NOW = datetime(2026, 11, 28, tzinfo=UTC)
_numbers = count(1)


@pytest.fixture(scope="module")
def admin(server: ServerUnderTest) -> Iterator[httpx.Client]:
    key = server.make_operator("admin-of-replicas")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        yield client


@pytest.fixture
def added(admin: httpx.Client) -> Iterator[dict[str, Any]]:
    """A replica that no other test has."""
    made = admin.post(REPLICAS, json={"address": f"gpu-{next(_numbers)}.example:7070"})
    assert made.status_code == 201
    yield made.json()
    admin.delete(f"{REPLICAS}/{made.json()['id']}")


def listed(admin: httpx.Client) -> dict[str, dict[str, Any]]:
    """By address."""
    return {row["address"]: row for row in admin.get(REPLICAS).json()["data"]}


def actions_on(admin: httpx.Client, replica: dict[str, Any]) -> list[str]:
    """The audit log's, the last first."""
    entries = admin.get("/admin/audit").json()["data"]
    return [entry["action"] for entry in entries if entry["resource"] == replica["id"]]


def test_an_added_replica_is_listed_once_and_not_seen_yet(
    admin: httpx.Client, added: dict[str, Any]
) -> None:
    again = admin.post(REPLICAS, json={"address": added["address"]})
    assert (again.status_code, again.json()) == (201, added)
    assert listed(admin)[added["address"]] == added
    assert added["connection"] is None
    assert (added["is_draining"], added["is_live"], added["state"]) == (False, False, None)
    assert actions_on(admin, added) == ["replica.add"]


@pytest.mark.parametrize("address", ["gpu-1", "::1:7070", "gpu-1:70700", "user@gpu-1:7070"])
def test_what_is_no_address_is_refused(admin: httpx.Client, address: str) -> None:
    refused = admin.post(REPLICAS, json={"address": address})
    check_envelope(refused, "invalid_parameter", param="address")
    assert address not in listed(admin)


def test_draining_and_resuming_can_be_repeated(admin: httpx.Client, added: dict[str, Any]) -> None:
    path = f"{REPLICAS}/{added['id']}"
    for deed, is_draining in (("drain", True), ("drain", True), ("resume", False)):
        changed = admin.post(f"{path}/{deed}")
        assert changed.json() == {**added, "is_draining": is_draining}
        assert listed(admin)[added["address"]]["is_draining"] is is_draining
    assert actions_on(admin, added) == ["replica.resume", "replica.drain", "replica.add"]


def test_a_removed_replica_is_gone(admin: httpx.Client, added: dict[str, Any]) -> None:
    path = f"{REPLICAS}/{added['id']}"
    assert admin.delete(path).json() == added
    assert added["address"] not in listed(admin)
    assert actions_on(admin, added) == ["replica.remove", "replica.add"]
    check_envelope(admin.delete(path), "replica_not_found")
    check_envelope(admin.post(f"{path}/drain"), "replica_not_found")


def make_row(*, seen_seconds_ago: float) -> Replica:
    return Replica(
        id="one",
        address="gpu-1:7070",
        is_draining=False,
        added_at=NOW - timedelta(days=1),
        incarnation="1",
        base_id="base",
        runtime_id="runtime",
        state="ready",
        seen_at=NOW - timedelta(seconds=seen_seconds_ago),
    )


def make_view(failure: ErrorInfo | None = None) -> ReplicaView:
    return ReplicaView(
        id="one",
        address="gpu-1:7070",
        role=ReplicaRole.DECODE,
        state=ReplicaState.READY if failure is None else ReplicaState.REFUSING,
        failure=failure,
        num_running=3,
        num_waiting=2,
        max_batch=8,
        num_open=4,
        num_resident=5,
        num_loading=1,
        kv_usage=0.5,
        arena_bytes=1 << 30,
        num_restarts=1,
        device="cuda:0",
        handovers=HandoverFigures(6, 1, 7 << 20, 0.5, 2e6),
    )


def test_a_replica_has_the_figures_of_the_answering_servers_connection() -> None:
    answered = replica_view(make_row(seen_seconds_ago=3), NOW, {"one": make_view()})
    assert answered.is_live
    assert msgspec.to_builtins(answered.connection) == {
        **{"state": "ready", "failure": None, "device": "cuda:0"},
        **{"num_running": 3, "num_waiting": 2, "max_batch": 8, "num_open": 4},
        **{"num_resident": 5, "num_loading": 1, "kv_usage": 0.5},
        **{"arena_bytes": 1 << 30, "num_restarts": 1, "role": "decode"},
        "handovers": {
            **{"num_complete": 6, "num_given_up": 1, "num_bytes": 7 << 20},
            **{"complete_per_second": 0.5, "bytes_per_second": 2e6},
        },
    }


def test_a_replica_out_of_reach_says_why() -> None:
    view = make_view(ErrorInfo("replica_unreachable", "No answer."))
    answered = replica_view(make_row(seen_seconds_ago=60), NOW, {"one": view})
    assert not answered.is_live
    assert answered.connection is not None
    assert msgspec.to_builtins(answered.connection.failure) == {
        "code": "replica_unreachable",
        "message": "No answer.",
    }
