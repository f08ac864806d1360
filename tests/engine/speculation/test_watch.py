"""Whose hidden states are collected: everybody's while drafts pay, else those of a probe."""

from __future__ import annotations

import pytest

from loraplex.engine.messages import SpeculationParams
from loraplex.engine.request import Request
from loraplex.engine.speculation.probes import LONGEST
from loraplex.engine.speculation.watch import LINGER, WARM_UP, Watch
from support.modelled_device import Costs, Device, Drafter, adapter, best_fixed_rate, make_request

A, B = adapter(1), adapter(2)
COSTS = Costs(step=20e-3, decode=0.2e-3, draft=0.2e-3)


def watched_device(drafter: Drafter, requests: list[Request]) -> Device:
    return Device(COSTS, {"p": drafter}, requests, watching=("p",))


def num_watched(device: Device, num_steps: int) -> list[int]:
    """Of each of the last steps."""
    return [len(some) for some in device.watched[-num_steps:]]


def requests_of(key: object, number: int, first: int = 0, max_tokens: int = 10**6) -> list[Request]:
    return [
        make_request(first + index, key, max_tokens=max_tokens)  # type: ignore[arg-type]
        for index in range(number)
    ]


@pytest.mark.parametrize("num_requests", [1, 16])
def test_of_a_version_whose_drafts_do_not_pay_one_request_is_watched_now_and_then(
    num_requests: int,
) -> None:
    device = watched_device(Drafter({A: 0.0}), requests_of(A, num_requests))
    device.run(3_000)
    seen = num_watched(device, 2_000)
    assert max(seen) == 1
    assert 2 * WARM_UP / LONGEST <= sum(seen) / 2_000 * 2 <= 5 * WARM_UP / LONGEST


@pytest.mark.parametrize("num_requests", [1, 16])
def test_a_version_whose_text_becomes_predictable_is_found_within_the_longest_interval(
    num_requests: int,
) -> None:
    drafter = Drafter({A: 0.0})
    for num_steps in (1_000, 1_100, 1_250):
        device = watched_device(drafter, requests_of(A, num_requests))
        drafter.right[A] = 0.0
        device.run(num_steps)
        drafter.right[A] = 1.0
        device.run(LONGEST + WARM_UP)
        (stats,) = device.control.explain(A)
        assert stats.num_accepted_tokens, "a probe"
        device.run(60)
        assert device.run(60) >= 0.9 * best_fixed_rate(device)
        assert set(num_watched(device, 50)) == {num_requests}


def test_all_requests_of_a_version_that_is_drafted_for_are_watched() -> None:
    device = watched_device(Drafter({A: 0.9, B: 0.0}), [*requests_of(A, 3), *requests_of(B, 3, 3)])
    device.run(400)
    for seen in device.watched[-100:]:
        assert sum(request.adapter == A for request in seen) == 3
        assert sum(request.adapter == B for request in seen) <= 1


def test_of_many_versions_whose_drafts_do_not_pay_few_are_watched_at_a_time() -> None:
    keys = [adapter(number) for number in range(64)]
    requests = [make_request(number, key) for number, key in enumerate(keys)]
    device = watched_device(Drafter(dict.fromkeys(keys, 0.0)), requests)
    device.run(300)
    assert sum(num_watched(device, 200)) <= 200 * 64 / 4
    assert device.run(200) >= 0.97 * device.plain_rate


def test_nobody_is_watched_where_even_right_drafts_would_not_pay() -> None:
    device = Device(
        Costs(step=1e-3, decode=1e-3, draft=2e-3),
        {"p": Drafter({A: 1.0})},
        requests_of(A, 64),
        watching=("p",),
    )
    device.run(400)
    assert not any(num_watched(device, 200))


def test_nobody_is_watched_any_more_when_the_batch_leaves_no_room_for_a_probe() -> None:
    device = watched_device(Drafter({A: 0.0}), requests_of(A, 1))
    device.run(1_000)
    while not device.watched[-1]:
        device.step()
    device.num_free = 0
    device.run(LONGEST)
    assert not any(num_watched(device, LONGEST - 2 * WARM_UP))


def test_a_version_of_short_answers_is_found_again() -> None:
    """Each ends before it would be ready if it was not watched from its start."""
    drafter = Drafter({A: 0.0})
    device = watched_device(drafter, requests_of(A, 1))
    device.run(1_500)

    def run_answers(first: int, number: int) -> None:
        for index in range(first, first + number):
            ended = device.requests[0].request_id
            device.requests = requests_of(A, 1, index)
            device.control.forget(ended)
            device.watched[-1] = set(filter(device.control.watches, device.requests))
            device.run(WARM_UP // 2)
            device.requests[0].token_ids.append(1)

    drafter.right[A] = 1.0
    run_answers(1, (LONGEST + 2 * WARM_UP) // (WARM_UP // 2))
    (stats,) = device.control.explain(A)
    assert stats.num_accepted_tokens


def test_who_asks_for_draft_tokens_is_always_watched_and_who_refuses_them_never() -> None:
    device = watched_device(Drafter({A: 0.0}), requests_of(A, 1))
    device.run(500)
    asking = make_request(8, A, SpeculationParams(num_tokens=2))
    refusing = make_request(9, A, SpeculationParams(num_tokens=0))
    assert device.control.watches(asking)
    assert not device.control.watches(refusing)


def test_who_cannot_be_drafted_for_is_neither_watched_nor_chosen_for_a_probe() -> None:
    drafter = Drafter({A: 0.0})
    others = [
        make_request(8, A, SpeculationParams(proposer="q")),
        make_request(9, A, SpeculationParams(proposer="p")),
    ]
    device = Device(COSTS, {"p": drafter, "q": drafter}, others, watching=("p",))
    device.run(1_000)
    assert set.union(*device.watched) == {others[1]}
    (stats, _) = device.control.explain(A)
    assert stats.num_drafts >= 5


def test_where_no_proposer_reads_hidden_states_nobody_is_watched() -> None:
    device = Device(COSTS, {"p": Drafter({A: 0.9})}, requests_of(A, 2))
    device.run(50)
    assert not any(device.watched)


def test_a_new_version_is_watched_for_a_while() -> None:
    watch = Watch(10)
    watch.count(10 + LINGER, LINGER)
    assert watch.covers("any", 10 + LINGER)
    watch.count(11 + LINGER, 1)
    assert not watch.covers("any", 11 + LINGER)
    watch.keep_all(100)
    assert watch.is_new(100)
    assert not watch.is_new(101)
    watch.keep_all(101)
    assert watch.covers("any", 101 + LINGER)
    assert not watch.is_new(101), "all were watched before"


def test_a_step_counts_once_however_many_groups_of_the_version_it_has() -> None:
    watch = Watch(0)
    for step in range(1, LINGER + 1):
        watch.count(step, 1)
        watch.count(step, 1)
    assert watch.covers_all


def test_steps_of_other_versions_leave_a_version_that_pays_watched() -> None:
    """Else the prompts of a version that is seldom asked for would be missing in its contexts."""
    drafter = Drafter({A: 1.0, B: 0.0})
    of_a, of_b = requests_of(A, 1), requests_of(B, 1, 1)
    device = watched_device(drafter, of_a)
    device.run(200)
    device.requests = of_b
    device.run(20 * LINGER)
    (later,) = requests_of(A, 1, 2)
    assert device.control.watches(later), "while its prompt is computed"


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_who_ends_before_a_draft_could_help_is_not_watched(num_tokens: int) -> None:
    device = watched_device(Drafter({A: 1.0}), requests_of(A, 1))
    device.run(100)
    (short,) = requests_of(A, 1, 1, max_tokens=num_tokens)
    (longer,) = requests_of(A, 1, 2, max_tokens=3)
    assert not device.control.watches(short)
    assert device.control.watches(longer)


def test_a_paid_probe_waits_while_steps_have_no_room_now_and_then() -> None:
    watch = open_watch(100)
    watch.choose("a", 100, is_from_start=False)
    for step in range(101, 101 + WARM_UP):
        (watch.block if step % 2 else watch.unblock)(step)
        assert watch.covers("a", step)
    assert watch.may_probe("a", 100 + WARM_UP)


def test_nobody_is_watched_for_a_probe_that_stays_impossible_and_it_need_not_be_paid_again() -> (
    None
):
    watch = open_watch(100)
    watch.choose("a", 100, is_from_start=False)
    watch.block(101)
    assert not watch.covers("a", 102 + WARM_UP)
    assert not watch.wants_one(102 + WARM_UP)
    watch.unblock(200)
    assert watch.is_open
    assert watch.wants_one(200), "what lies between was not seen"


def open_watch(step: int) -> Watch:
    watch = Watch(0)
    watch.count(step, LINGER + 1)
    watch.open(step)
    assert watch.wants_one(step)
    return watch


def test_a_request_is_ready_after_the_warm_up_or_at_once_if_watched_from_its_start() -> None:
    watch = open_watch(100)
    watch.choose("a", 100, is_from_start=False)
    assert [watch.may_probe("a", step) for step in (100 + WARM_UP - 1, 100 + WARM_UP)] == [0, 1]
    assert not watch.may_probe("b", 100 + WARM_UP)
    watch = open_watch(100)
    watch.choose("a", 100, is_from_start=True)
    assert watch.may_probe("a", 101)


def test_a_request_that_ends_or_does_not_decode_makes_way_for_another_one() -> None:
    watch = open_watch(100)
    watch.choose("a", 100, is_from_start=False)
    watch.drop("b")
    assert not watch.wants_one(101)
    watch.drop("a")
    assert watch.wants_one(102)
    watch.choose("b", 102, is_from_start=False)
    last = 102 + WARM_UP + LINGER
    assert [watch.wants_one(step) for step in (last, last + 1)] == [False, True]


def test_after_a_probe_its_request_is_watched_for_the_next_one_if_that_is_soon() -> None:
    watch = open_watch(100)
    watch.choose("a", 100, is_from_start=False)
    watch.close(120)
    assert watch.may_probe("a", 120 + WARM_UP)
    assert not watch.covers("a", 121 + WARM_UP)
    watch.open(121 + WARM_UP)
    assert watch.wants_one(121 + WARM_UP), "what lies between was not seen"
