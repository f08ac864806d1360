"""The chosen drafts on devices with known costs and proposers, in simulated time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.messages import SpeculationParams
from loraplex.engine.request import Request
from loraplex.engine.scheduling.step_costs import StepCosts, StepShape
from loraplex.engine.speculation import control as control_module
from loraplex.engine.speculation.control import (
    FIRST_TOKENS,
    MAX_STATS,
    Choice,
    Control,
)
from support.modelled_device import (
    MAX_TOKENS,
    Costs,
    Device,
    Drafter,
    adapter,
    best_fixed_rate,
    make_request,
)

A, B = adapter(1), adapter(2)
MEMORY_BOUND = Costs(step=20e-3, decode=0.2e-3, draft=0.2e-3)
COMPUTE_BOUND = Costs(step=2e-3, decode=1e-3, draft=1e-3)
BETWEEN = Costs(step=10e-3, decode=2e-3, draft=1.5e-3)
ROOFLINE = Costs(step=18e-3, decode=0.3e-3, draft=0.3e-3, flat_rows=40)


def requests(num: int, *keys: object) -> list[Request]:
    return [make_request(index, keys[index % len(keys)]) for index in range(num)]  # type: ignore[arg-type]


# --- how many -----------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.95, pytest.param(0.8, marks=pytest.mark.slow), 0.5, 0.2])
@pytest.mark.parametrize(("num_requests", "num_seeds"), [(1, 4), (16, 2)])
@pytest.mark.parametrize("costs", [MEMORY_BOUND, COMPUTE_BOUND, BETWEEN, ROOFLINE], ids=str)
def test_comes_close_to_the_best_fixed_number(
    costs: Costs, num_requests: int, num_seeds: int, right: float
) -> None:
    shares = []
    for seed in range(num_seeds):
        device = Device(costs, {"p": Drafter({A: right})}, requests(num_requests, A), seed=seed)
        device.run(100)
        shares.append(device.run(200) / best_fixed_rate(device))
    assert sum(shares) >= 0.95 * num_seeds


@pytest.mark.parametrize("num_requests", [4, 16, 40])
def test_drafts_as_much_as_a_graph_has_rows_for_and_never_more(num_requests: int) -> None:
    costs = MEMORY_BOUND._replace(draft=1e-6, graph_rows=40, launch=60e-3)
    device = Device(costs, {"p": Drafter({A: 0.95})}, requests(num_requests, A))
    device.run(200)
    free = 40 - num_requests
    assert max(device.num_draft_tokens) == min(free, MAX_TOKENS * num_requests)


def test_drafts_much_alone_and_nothing_in_a_full_batch() -> None:
    costs = Costs(step=20e-3, decode=1e-3, draft=1e-3)
    alone = Device(costs, {"p": Drafter({A: 0.8})}, requests(1, A))
    full = Device(costs, {"p": Drafter({A: 0.8})}, requests(200, A))
    for device in (alone, full):
        device.run(300)
    assert sum(number >= 2 for number in alone.num_draft_tokens[100:]) > 0.9 * 200
    assert sum(full.num_draft_tokens[100:]) <= 200


def test_of_two_adapters_the_friendly_one_gets_the_drafts() -> None:
    drafter = Drafter({A: 0.9, B: 0.02})
    device = Device(Costs(20e-3, 0.5e-3, 1e-3), {"p": drafter}, requests(8, A, B))
    device.run(100)
    assert device.run(200) >= 0.95 * best_fixed_rate(device)
    assert device.control.explain(A)[0].num_tokens >= 3
    assert device.control.explain(B)[0].num_tokens == 0


def test_what_drafting_itself_costs_counts() -> None:
    cheap = Drafter({A: 0.8}, token=0.1e-3)
    dear = Drafter({A: 0.8}, call=1e-3, request=1e-3, token=15e-3)
    for drafter, is_worth_it in ((cheap, True), (dear, False)):
        device = Device(MEMORY_BOUND, {"p": drafter}, requests(2, A))
        device.run(100)
        assert device.run(200) >= 0.95 * best_fixed_rate(device)
        assert bool(device.control.explain(A)[0].num_tokens) is is_worth_it


@pytest.mark.parametrize("place", [2e-3, 8e-3, 24e-3])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_what_a_pass_costs_is_shared_by_those_that_are_drafted_for_in_it(
    num_requests: int, place: float
) -> None:
    drafter = Drafter({A: 0.8}, place=place, token=0.05e-3)
    device = Device(MEMORY_BOUND, {"p": drafter}, requests(num_requests, A))
    device.run(150)
    assert device.run(200) >= 0.95 * best_fixed_rate(device)


def test_who_is_cheap_in_company_is_known_to_be_dear_alone() -> None:
    """A pass takes as long as a step of one request: 16 share it, alone no draft token is worth
    one."""
    costs = Costs(step=10e-3, decode=2e-3, draft=0.2e-3)
    device = Device(costs, {"p": Drafter({A: 0.8}, place=12e-3)}, requests(16, A))
    device.run(60)
    assert sum(device.num_draft_tokens[50:]) > 10 * 16
    device.requests = requests(1, A)
    assert device.run(100) >= 0.98 * device.plain_rate
    device.requests = requests(16, A)
    device.run(20)
    assert device.run(40) >= 0.95 * best_fixed_rate(device)


def test_who_is_dear_alone_is_tried_in_company() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.9}, place=10e-3)}, requests(1, A))
    device.run(60)
    device.requests = requests(16, A)
    device.run(60)
    assert device.run(100) >= 0.95 * best_fixed_rate(device)


def test_a_pass_is_not_shared_with_requests_that_are_not_worth_it() -> None:
    drafter = Drafter({A: 0.8, B: 0.02}, place=30e-3)
    device = Device(MEMORY_BOUND, {"p": drafter}, [*requests(1, A), *requests(15, B)])
    device.run(100)
    assert device.run(200) >= 0.97 * best_fixed_rate(device)


def test_one_for_whom_none_shares_a_pass_gets_the_next_best_proposer() -> None:
    drafters = {
        "dear": Drafter({A: 0.95, B: 0.02}, place=30e-3),
        "cheap": Drafter({A: 0.6, B: 0.02}, request=0.02e-3),
    }
    device = Device(MEMORY_BOUND, drafters, [*requests(1, A), *requests(15, B)])
    device.run(200)
    assert device.run(200) >= 0.97 * best_fixed_rate(device)


def test_starts_modestly_and_with_nothing_where_nothing_is_known() -> None:
    control = Control(["p"], max_tokens=MAX_TOKENS, costs=StepCosts())
    assert control.choose(requests(64, A), 10_000) == {}
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 1.0})}, requests(64, A))
    device.run(40)
    most = FIRST_TOKENS
    for number in device.num_draft_tokens:
        assert number <= most
        most = max(most, 2 * number)
    assert device.num_draft_tokens[-1] > 300


# --- off, and on again --------------------------------------------------------------------------


def test_who_wants_no_drafts_changes_nothing_that_is_known() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.9})}, requests(1, A))
    device.run(100)
    known = device.control.explain(A)
    assert known[0].num_tokens > 0
    device.requests = [make_request(1, A, SpeculationParams(num_tokens=0))]
    device.run(20)
    assert not any(device.num_draft_tokens[100:])
    assert device.control.explain(A) == known


@pytest.mark.parametrize("num_requests", [1, 4, 32])
@pytest.mark.parametrize("costs", [MEMORY_BOUND, COMPUTE_BOUND, BETWEEN, ROOFLINE], ids=str)
def test_a_hostile_adapter_costs_next_to_nothing(costs: Costs, num_requests: int) -> None:
    device = Device(costs, {"p": Drafter({A: 0.01})}, requests(num_requests, A))
    assert device.run(50) >= 0.9 * device.plain_rate
    assert device.run(300) >= 0.98 * device.plain_rate


def test_a_hostile_adapter_among_friendly_ones_is_off_within_50_steps() -> None:
    drafter = Drafter({A: 0.9, B: 0.0})
    device = Device(BETWEEN, {"p": drafter}, requests(4, A))
    device.run(100)
    device.requests = requests(4, B)
    assert device.run(50) >= 0.95 * device.plain_rate
    assert device.run(300) >= 0.98 * device.plain_rate


def test_many_hostile_adapters_cost_no_more_than_one() -> None:
    keys = [adapter(number) for number in range(64)]
    drafter = Drafter(dict.fromkeys(keys, 0.0), request=0.2e-3)
    device = Device(BETWEEN, {"p": drafter, "q": drafter}, requests(64, *keys))
    device.run(50)
    assert device.run(200) >= 0.98 * device.plain_rate


@pytest.mark.parametrize("costs", [MEMORY_BOUND, BETWEEN], ids=str)
def test_is_on_again_when_drafts_have_become_right(costs: Costs) -> None:
    drafter = Drafter({A: 0.0})
    device = Device(costs, {"p": drafter}, requests(1, A))
    device.run(300)
    drafter.right[A] = 0.9
    device.run(700)
    assert device.run(100) >= 0.93 * best_fixed_rate(device)


@pytest.mark.parametrize("costs", [MEMORY_BOUND, BETWEEN], ids=str)
def test_is_off_again_when_drafts_have_become_wrong(costs: Costs) -> None:
    drafter = Drafter({A: 0.95})
    device = Device(costs, {"p": drafter}, requests(1, A))
    device.run(100)
    drafter.right[A] = 0.0
    device.run(100)
    assert device.run(200) >= 0.97 * device.plain_rate


def test_probes_grow_rare() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.0})}, requests(1, A))
    device.run(2_000)
    assert 1 <= sum(map(bool, device.num_draft_tokens[1_000:])) <= 4


def test_while_nothing_is_drafted_it_decides_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide, decided = Control._decide, []

    def counted(control: Control, *args: Any) -> dict[Request, Choice]:
        decided.append(control)
        return decide(control, *args)

    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.0})}, requests(4, A))
    device.run(100)
    monkeypatch.setattr(Control, "_decide", counted)
    device.run(200)
    assert len(decided) <= 60


def test_a_rest_ends_when_another_request_decodes() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.0, B: 0.9})}, requests(4, A))
    device.run(300)
    assert not any(device.num_draft_tokens[-20:]), "it rests"
    asking = make_request(9, A, SpeculationParams(num_tokens=3))
    device.requests = [*device.requests, asking]
    device.step()
    assert device.steps[-1] == {asking: Choice("p", 3)}


def test_a_rest_ends_for_a_probe_that_is_due() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.0})}, requests(1, A))
    device.run(1_000)
    probes = [step for step, number in enumerate(device.num_draft_tokens) if number][-4:]
    gaps = [after - before for before, after in pairwise(probes)]
    assert gaps == sorted(gaps)
    assert all(gap & (gap - 1) == 0 for gap in gaps), "at the doubled intervals, not later"


def test_where_even_right_drafts_would_not_pay_nothing_is_probed() -> None:
    costs = Costs(step=1e-3, decode=1e-3, draft=2e-3)
    device = Device(costs, {"p": Drafter({A: 1.0})}, requests(64, A))
    device.run(200)
    assert sum(device.num_draft_tokens[20:]) == 0


def test_drafts_that_do_not_come_are_no_evidence_against_those_that_do() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.9}, hit_rate=0.1)}, requests(1, A))
    device.run(400)
    (stats,) = device.control.explain(A)
    assert stats.acceptance > 0.75
    assert stats.num_tokens >= 4


def test_a_dear_proposer_that_has_nothing_to_say_is_not_asked() -> None:
    drafter = Drafter({A: 0.9}, request=3e-3, hit_rate=0.0)
    device = Device(MEMORY_BOUND, {"p": drafter}, requests(1, A))
    device.run(100)
    assert device.run(300) >= 0.98 * device.plain_rate


# --- by whom ------------------------------------------------------------------------------------


def test_each_adapter_gets_the_proposer_that_is_best_for_it() -> None:
    drafters = {
        "p": Drafter({A: 0.9, B: 0.2}, request=0.05e-3),
        "q": Drafter({A: 0.2, B: 0.9}, request=0.05e-3),
    }
    device = Device(MEMORY_BOUND, drafters, requests(4, A, B))
    device.run(400)
    for key, best in ((A, "p"), (B, "q")):
        planned = {stats.proposer: stats.num_tokens for stats in device.control.explain(key)}
        assert planned.pop(best) >= 3
        assert not any(planned.values())


def test_a_dear_and_good_proposer_wins_alone_and_a_cheap_one_in_company() -> None:
    drafters = {
        "cheap": Drafter({A: 0.5}, request=0.02e-3),
        "dear": Drafter({A: 0.95}, call=0.5e-3, token=0.7e-3),
    }
    costs = Costs(20e-3, 0.2e-3, 0.3e-3)
    for num_requests, best in ((1, "dear"), (48, "cheap")):
        device = Device(costs, drafters, requests(num_requests, A))
        device.run(150)
        assert device.run(200) >= 0.95 * best_fixed_rate(device)
        chosen = [choice.proposer for step in device.steps[150:] for choice in step.values()]
        assert chosen.count(best) > 0.9 * len(chosen)


def test_the_other_proposer_is_found_when_it_has_become_better() -> None:
    drafters = {"p": Drafter({A: 0.6}), "q": Drafter({A: 0.0})}
    device = Device(MEMORY_BOUND, drafters, requests(1, A))
    device.run(200)
    drafters["q"].right[A] = 0.95
    device.run(800)
    assert device.run(100) >= 0.9 * best_fixed_rate(device)


# --- what requests ask for ----------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given_tokens"), [(3, 3), (0, 0), (64, MAX_TOKENS)])
def test_a_request_gets_the_number_that_it_asks_for(asked: int, given_tokens: int) -> None:
    hostile = Drafter({A: 0.0})
    request = make_request(0, A, SpeculationParams(num_tokens=asked))
    device = Device(MEMORY_BOUND, {"p": hostile}, [request, make_request(1, A)])
    device.run(60)
    numbers = [step[request].num_tokens if request in step else 0 for step in device.steps]
    assert numbers == [given_tokens] * 60
    (stats,) = device.control.explain(A)
    assert stats.num_draft_tokens >= 60 * given_tokens
    assert stats.num_tokens == given_tokens


def test_a_request_gets_the_proposer_that_it_asks_for_as_far_as_that_pays() -> None:
    drafters = {"p": Drafter({A: 0.9, B: 0.9}), "q": Drafter({A: 0.6, B: 0.0})}
    of_a = make_request(0, A, SpeculationParams(proposer="q"))
    of_b = make_request(1, B, SpeculationParams(proposer="q"))
    device = Device(MEMORY_BOUND, drafters, [of_a, of_b])
    device.run(100)
    assert {choice.proposer for step in device.steps for choice in step.values()} == {"q"}
    assert sum(of_a in step for step in device.steps[50:]) >= 45
    assert sum(of_b in step for step in device.steps[50:]) <= 5


def test_a_proposer_that_there_is_not_drafts_nothing() -> None:
    request = make_request(0, A, SpeculationParams(proposer="unknown", num_tokens=4))
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.9})}, [request])
    device.run(10)
    assert not any(device.steps)


def test_what_is_asked_for_teaches_as_anything_else() -> None:
    asking = [make_request(0, A, SpeculationParams(num_tokens=4))]
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.95})}, asking)
    device.run(60)
    assert device.control.explain(A)[0].acceptance > 0.8


# --- what is remembered -------------------------------------------------------------------------


def test_a_new_adapter_is_taken_for_what_the_others_are() -> None:
    for right in (0.9, 0.0):
        device = Device(BETWEEN, {"p": Drafter({A: right, B: right})}, requests(1, A))
        device.run(150)
        device.requests = requests(1, B)
        device.run(1)
        assert (device.num_draft_tokens[-1] >= 2) is (right > 0.5)


def test_remembers_a_bounded_number_of_adapters_and_all_that_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "MAX_ADAPTERS", 300)
    keys = [adapter(number) for number in range(400)]
    device = Device(MEMORY_BOUND, {"p": Drafter(dict.fromkeys(keys, 0.9))}, [])
    before = [0.0] * 4
    for key in keys:
        device.requests = [make_request(0, key)]
        device.step()
        (totals,) = device.control.totals()
        counts = [
            totals.num_drafts,
            totals.num_draft_tokens,
            totals.num_accepted_tokens,
            totals.seconds,
        ]
        assert all(now >= earlier for now, earlier in zip(counts, before, strict=True))
        before = counts
    snapshot = device.control.snapshot()
    assert len(snapshot) == MAX_STATS
    assert [stats.key for stats in snapshot] == keys[: -MAX_STATS - 1 : -1]
    assert device.control.explain(keys[99]) == []
    assert len(device.control.explain(keys[100])) == 1
    (totals,) = device.control.totals()
    assert totals.num_draft_tokens == sum(device.num_draft_tokens)
    assert totals.num_drafts == sum(map(bool, device.num_draft_tokens))


def test_tokens_that_were_evicted_are_not_predicted_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []
    predict = StepCosts.predict

    def noting(costs: StepCosts, shape: StepShape) -> float:
        shapes.append(shape)
        return predict(costs, shape)

    monkeypatch.setattr(StepCosts, "predict", noting)
    compacted, whole = requests(2, None)
    compacted.kv.num_evicted = 60
    Device(MEMORY_BOUND, {"p": Drafter({None: 0.9})}, [compacted, whole]).step()
    contexts = {shape.num_context_tokens for shape in shapes if shape.num_decodes == 2}
    assert contexts == {100 - 60 + 100}


def test_stats_count_what_was_verified() -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 0.8})}, requests(3, A))
    device.run(50)
    (stats,) = device.control.explain(A)
    assert stats.num_drafts == sum(map(len, device.steps))
    assert stats.num_draft_tokens == sum(device.num_draft_tokens)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_tokens == max(choice.num_tokens for choice in device.steps[-1].values())


def test_says_the_same_when_told_the_same() -> None:
    def steps() -> list[list[tuple[str, str, int]]]:
        drafters = {"p": Drafter({A: 0.7, B: 0.1}, hit_rate=0.5), "q": Drafter({A: 0.5, B: 0.4})}
        device = Device(BETWEEN, drafters, requests(5, A, B))
        device.run(120)
        return [[(it.request_id, *choice) for it, choice in step.items()] for step in device.steps]

    assert steps() == steps()


@pytest.mark.parametrize("num_requests", [1, 6])
def test_what_a_draft_costs_stays_known_where_all_steps_are_alike(num_requests: int) -> None:
    device = Device(MEMORY_BOUND, {"p": Drafter({A: 1.0})}, requests(num_requests, A), noise=0.01)
    device.run(600)
    seconds = MAX_TOKENS * num_requests * device.learned.draft_token_seconds()
    error = seconds - MAX_TOKENS * num_requests * MEMORY_BOUND.draft
    assert abs(error) < 0.05 * MEMORY_BOUND.seconds(StepShape(0, num_requests, 0))


# --- bounds -------------------------------------------------------------------------------------

ASKED = st.sampled_from(
    [None, None, SpeculationParams("q"), SpeculationParams(None, 0), SpeculationParams("p", 5)]
)


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(st.tuples(st.sampled_from([None, A, B]), ASKED), min_size=1, max_size=12),
    costs=st.sampled_from([MEMORY_BOUND, COMPUTE_BOUND, BETWEEN, ROOFLINE]),
    rooms=st.lists(st.integers(-5, 60), min_size=30, max_size=30),
    rights=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    hit_rate=st.floats(0, 1),
)
def test_never_drafts_more_than_there_is_room_for(
    asked: list[tuple[object, SpeculationParams | None]],
    costs: Costs,
    rooms: list[int],
    rights: tuple[float, float],
    hit_rate: float,
) -> None:
    drafters = {
        name: Drafter(dict.fromkeys((None, A, B), right), hit_rate=hit_rate)
        for name, right in zip("pq", rights, strict=True)
    }
    running = [make_request(i, *it) for i, it in enumerate(asked)]  # type: ignore[arg-type]
    device = Device(costs, drafters, running)
    for room in rooms:
        device.num_free = room
        device.step()
        choices = device.steps[-1]
        assert choices.keys() <= set(running)
        assert sum(choice.num_tokens for choice in choices.values()) <= max(room, 0)
        for request, choice in choices.items():
            wish = request.submitted.speculation
            assert 1 <= choice.num_tokens <= MAX_TOKENS
            assert wish is None or wish.num_tokens != 0
            assert wish is None or wish.proposer in (None, choice.proposer)
