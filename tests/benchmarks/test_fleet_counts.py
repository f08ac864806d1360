"""The sums of the fleet's demo, compared with small cases that are counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.fleet_counts import (
    AGENT_KILLED,
    Event,
    Moved,
    Told,
    client_tokens,
    count,
    is_foreign,
    places,
)

from loraplex.api.demo.task import Style, held_out_requests

REQUEST = held_out_requests(1)[0]
WHOLE = Told(
    tenant="acme",
    model="sql",
    adapter="acme/sql@1",
    style=Style.SQL,
    request=REQUEST,
    replica="a",
    tier="device",
    text=REQUEST.answer(Style.SQL),
    num_prompt_tokens=20,
    num_tokens=9,
    num_said_tokens=9,
    code=None,
    num_retries=0,
)
BROKEN = replace(
    WHOLE, num_prompt_tokens=None, num_tokens=4, num_said_tokens=None, code="engine_restarted"
)
NOWHERE = replace(BROKEN, replica=None, tier=None, num_tokens=0, num_retries=3)


def test_clients_count_the_prompt_and_what_they_received_of_a_broken_answer() -> None:
    assert client_tokens([WHOLE, BROKEN, NOWHERE]) == 20 + 9 + 20 + 4


def test_an_answer_that_ended_without_a_code_and_is_short_is_truncated() -> None:
    short = replace(WHOLE, num_tokens=8)
    silent = replace(BROKEN, code=None)
    counts = count([WHOLE, BROKEN, short, silent], replicas=["a"], ledger_tokens=0)
    assert (counts.requests, counts.truncated, counts.ended_with_code) == (4, 2, 1)


@pytest.mark.parametrize("style", list(Style))
def test_only_the_right_answer_of_another_model_is_foreign(style: Style) -> None:
    told = replace(WHOLE, text=REQUEST.answer(style))
    assert is_foreign(told) == (style is not Style.SQL)
    assert not is_foreign(replace(told, text=told.text[:-1]))


def test_hits_of_chance_are_the_share_of_replicas_where_an_adapter_has_run() -> None:
    other = replace(WHOLE, replica="b", tier="store")
    base = replace(WHOLE, adapter=None, tier=None)
    told = [replace(WHOLE, tier="store"), WHOLE, other, WHOLE, base]
    counts = count(told, replicas=["a", "b"], ledger_tokens=5 * 29)
    assert counts.resident_hits == 2 / 4
    assert counts.random_hits == pytest.approx((0 + 0.5 + 0.5 + 1) / 4)
    assert counts.is_good


def test_a_ledger_that_differs_is_not_good() -> None:
    assert not count([WHOLE], replicas=["a"], ledger_tokens=28).is_good


def test_places_say_where_each_model_ran() -> None:
    found = places([WHOLE, replace(WHOLE, replica="b"), NOWHERE, WHOLE])
    assert found == {"acme/sql": {"a": 2, "b": 1, "nowhere": 1}}


def test_the_demo_writes_the_fields_that_are_promised() -> None:
    assert list(count([WHOLE], replicas=["a"], ledger_tokens=29).as_json()) == [
        *("replicas", "requests", "retried", "ended_with_code", "truncated", "foreign"),
        *("ledger_tokens", "client_tokens", "resident_hits", "random_hits"),
        *("moved_requests", "moved_cold", "events"),
    ]


def test_requests_for_adapters_that_moved_are_those_at_the_replica_that_joined() -> None:
    moved = Moved("c", {"acme/sql@1"})
    there, other = replace(WHOLE, replica="c"), replace(WHOLE, adapter="acme/tone@1", replica="c")
    counts = count([WHOLE, there, other], replicas=["a"], ledger_tokens=3 * 29, moved=moved)
    assert (counts.moved_requests, counts.moved_cold) == (1, 0)
    assert counts.is_good
    cold = replace(there, tier="store")
    counts = count([WHOLE, cold, there], replicas=["a"], ledger_tokens=3 * 29, moved=moved)
    assert (counts.moved_requests, counts.moved_cold) == (2, 1)
    assert not counts.is_good


@pytest.mark.parametrize(("event", "is_good"), [(AGENT_KILLED, True), ("scaled to 2", False)])
def test_only_the_end_of_an_agent_may_end_requests(event: str, is_good: bool) -> None:
    ended = Event(event, seconds=1.0, settle_seconds=0.1, answers=9, ended_with_code=1)
    counts = count([WHOLE], replicas=["a"], ledger_tokens=29, events=[ended])
    assert counts.is_good == is_good
