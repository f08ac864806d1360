"""The learned costs of a device with known costs, and the resulting step sizes."""

from __future__ import annotations

import random

import pytest

from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.messages import GenerationRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.batch import ScheduledSequence
from loraplex.engine.scheduling.step_costs import StepCosts, StepShape


def true_seconds(shape: StepShape, speed: float = 1.0) -> float:
    prefill, decodes, context, drafts = shape
    seconds = 0.004 + 1e-4 * prefill + 3e-4 * decodes + 2e-7 * context + 2e-4 * drafts
    return seconds / speed


def random_shape(rng: random.Random) -> StepShape:
    decodes = rng.randrange(64)
    prefill = rng.choice((0, 0, rng.randrange(512)))
    return StepShape(prefill, decodes, decodes * rng.randrange(1, 500))


def make_costs(num_steps: int = 400, *, noise: float = 0.05, speed: float = 1.0) -> StepCosts:
    costs = StepCosts()
    observe_random(costs, num_steps, noise=noise, speed=speed)
    return costs


def observe_random(costs: StepCosts, num_steps: int, *, noise: float, speed: float) -> None:
    rng = random.Random(7)
    for _ in range(num_steps):
        shape = random_shape(rng)
        costs.observe(shape, true_seconds(shape, speed) * rng.uniform(1 - noise, 1 + noise))


def worst_error(costs: StepCosts, speed: float = 1.0) -> float:
    rng = random.Random(11)
    shapes = [random_shape(rng) for _ in range(200)]
    return max(abs(costs.predict(s) / true_seconds(s, speed) - 1) for s in shapes)


def test_learns_a_steps_cost_through_noise() -> None:
    assert worst_error(make_costs()) < 0.05


def test_learns_exactly_from_exact_steps() -> None:
    assert worst_error(make_costs(noise=0.0)) < 1e-3


def test_a_stall_however_long_hardly_moves_the_estimate() -> None:
    costs = make_costs()
    before = costs.predict(StepShape(256, 16, 4000))
    costs.observe(StepShape(256, 16, 4000), 3600.0)
    assert costs.predict(StepShape(256, 16, 4000)) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("speed", [0.25, 4.0])
def test_follows_a_device_whose_speed_changes(speed: float) -> None:
    costs = make_costs()
    observe_random(costs, 1_500, noise=0.05, speed=speed)
    assert worst_error(costs, speed) < 0.05


def test_remembers_a_prompts_cost_through_a_long_time_without_prompts() -> None:
    costs = make_costs()
    shape = StepShape(0, 8, 800)
    for _ in range(20_000):
        costs.observe(shape, true_seconds(shape))
    assert costs.recompute_seconds(1_000) == pytest.approx(0.1, rel=0.1)


def test_predictions_never_fall_when_a_step_grows() -> None:
    rng = random.Random(3)
    costs = StepCosts()
    for _ in range(300):
        # Durations that have nothing to do with the shape tempt a fit to negative costs.
        costs.observe(random_shape(rng), rng.uniform(0.001, 1.0))
        small = random_shape(rng)
        large = StepShape(*(value + rng.randrange(100) for value in small))
        assert 0 <= costs.predict(small) <= costs.predict(large)


def test_knowing_nothing_it_defers_and_refuses_nothing() -> None:
    costs = StepCosts()
    assert costs.predict(StepShape(100, 10, 1000)) == 0.0
    assert costs.max_prefill_tokens(10, 1000, target_seconds=0.01, limit=512) == 512
    assert costs.wait_seconds(10_000, 10_000, StepShape(0, 8, 800)) == 0.0


@pytest.mark.parametrize("target_seconds", [0.015, 0.02, 0.04])
def test_prompt_tokens_fill_the_target_and_no_more(target_seconds: float) -> None:
    costs = make_costs(noise=0.0)
    tokens = costs.max_prefill_tokens(16, 4000, target_seconds, limit=10_000)
    assert 0 < tokens < 10_000
    assert costs.predict(StepShape(tokens, 16, 4000)) <= target_seconds
    assert costs.predict(StepShape(tokens + 1, 16, 4000)) > target_seconds


def test_prompt_tokens_stay_between_none_and_the_limit() -> None:
    costs = make_costs()
    assert costs.max_prefill_tokens(64, 30_000, target_seconds=0.001, limit=512) == 0
    assert costs.max_prefill_tokens(1, 10, target_seconds=100.0, limit=512) == 512


def test_recomputing_costs_what_prompt_tokens_add() -> None:
    assert make_costs().recompute_seconds(500) == pytest.approx(500 * 1e-4, rel=0.05)


def test_swap_follows_the_bandwidth_that_was_seen() -> None:
    costs = StepCosts(swap_bytes_per_second=1e9)
    assert costs.swap_seconds(10**9) == 1.0
    for _ in range(10):
        costs.observe_swap(10**6, 0.01)
    assert costs.swap_seconds(10**9) == pytest.approx(10.0)
    for _ in range(1_000):
        costs.observe_swap(10**6, 0.001)
    assert costs.swap_seconds(10**9) == pytest.approx(1.0, rel=0.01)


def test_a_wait_lasts_as_long_as_the_steps_that_work_it_off() -> None:
    costs = make_costs(noise=0.0)
    running = StepShape(0, 16, 4000)
    # 2,000 prompt tokens, and 4,000 outputs by steps that give 16 each.
    expected = 2_000 * 1e-4 + 4_000 / 16 * true_seconds(running)
    assert costs.wait_seconds(2_000, 4_000, running) == pytest.approx(expected, rel=0.01)


# --- draft tokens -------------------------------------------------------------------------------


def observe(costs: StepCosts, *shapes: StepShape, noise: float = 0.05) -> None:
    rng = random.Random(13)
    for shape in shapes:
        costs.observe(shape, true_seconds(shape) * rng.uniform(1 - noise, 1 + noise))


def test_a_drafted_token_costs_a_prompts_token_until_it_is_known() -> None:
    costs = make_costs()
    observe(costs, StepShape(0, 4, 400, 8), StepShape(0, 4, 400, 4))
    assert costs.draft_token_seconds() == costs.recompute_seconds(1)


def test_learns_within_a_few_steps_what_a_drafted_token_costs() -> None:
    costs = make_costs()
    observe(costs, *[StepShape(0, 8, 800, drafts) for drafts in (16, 32, 64, 48, 64, 32, 64, 48)])
    assert costs.draft_token_seconds() == pytest.approx(2e-4, rel=0.15)


def test_a_first_step_that_compiles_does_not_make_drafts_dear() -> None:
    costs = make_costs()
    costs.observe(StepShape(0, 8, 800, 16), 30.0)
    observe(costs, *[StepShape(0, 8, 800, 16) for _ in range(8)])
    assert costs.draft_token_seconds() == pytest.approx(2e-4, rel=0.3)


def test_steps_without_drafts_are_predicted_as_if_there_were_none() -> None:
    with_drafts, without = make_costs(), make_costs()
    rng = random.Random(17)
    for _ in range(300):
        shape = random_shape(rng)
        observe(without, shape)
        observe(with_drafts, shape, shape._replace(num_draft_tokens=rng.randrange(64)))
    assert worst_error(with_drafts) < 0.05
    assert worst_error(without) < 0.05


def test_remembers_what_a_draft_costs_through_a_long_time_without() -> None:
    costs = make_costs()
    observe(costs, *[StepShape(0, 8, 800, drafts) for drafts in range(1, 60)])
    known = costs.draft_token_seconds()
    observe(costs, *[StepShape(0, 8, 800)] * 20_000)
    assert costs.draft_token_seconds() == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize("decodes", [1, 16])
def test_where_drafts_come_with_every_decode_both_stay_what_they_were(decodes: int) -> None:
    """Such steps do not tell what is whose; what was known before does."""
    costs = make_costs()
    observe(costs, *[StepShape(0, decodes, 300, 4 * decodes) for _ in range(30)])
    shape = StepShape(0, decodes, 300, 4 * decodes)
    observe(costs, *[shape] * 2_000)
    assert costs.predict(shape) == pytest.approx(true_seconds(shape), rel=0.02)
    assert costs.draft_token_seconds() == pytest.approx(2e-4, rel=0.5)


# --- captured steps -------------------------------------------------------------------------------

MAX_GRAPH_ROWS = 64
LAUNCH_SECONDS = 0.02


def make_graph_costs() -> StepCosts:
    """Learned of a device that launches kernel by kernel what has more rows than a graph."""
    costs = StepCosts(max_graph_rows=MAX_GRAPH_ROWS)
    rng = random.Random(19)
    for _ in range(400):
        shape = random_shape(rng)._replace(num_draft_tokens=rng.choice((0, rng.randrange(32))))
        costs.observe(shape, graph_seconds(shape) * rng.uniform(0.98, 1.02))
    return costs


def graph_seconds(shape: StepShape) -> float:
    is_launched = sum((shape[0], shape[1], shape[3])) > MAX_GRAPH_ROWS
    return true_seconds(shape) + LAUNCH_SECONDS * is_launched


def test_learns_what_launching_kernel_by_kernel_adds() -> None:
    costs = make_graph_costs()
    for shape in (
        StepShape(0, 64, 9000),
        StepShape(1, 64, 9000),
        StepShape(48, 16, 4000),
        StepShape(49, 16, 4000),
        StepShape(0, 8, 2000, 56),
        StepShape(0, 8, 2000, 57),
    ):
        assert costs.predict(shape) == pytest.approx(graph_seconds(shape), rel=0.05)
    assert costs.draft_token_seconds() == pytest.approx(2e-4, rel=0.15)


@pytest.mark.parametrize(
    ("target_seconds", "expected"),
    [
        (0.008, 0),
        (0.0115, 19),
        (0.02, 48),  # what a graph has room for, for one more would take 0.02 s more
        (0.036, 64),
        (1.0, 512),
    ],
)
def test_prompt_tokens_stay_in_a_graph_unless_more_of_them_fit_outside(
    target_seconds: float, expected: int
) -> None:
    tokens = make_graph_costs().max_prefill_tokens(16, 4000, target_seconds, limit=512)
    assert tokens == pytest.approx(
        expected, abs=0.15 * expected if expected not in (48, 512) else 0
    )


def scheduled(num_tokens: int, *, start: int, num_drafts: int = 0) -> ScheduledSequence:
    submitted = GenerationRequest("r", "acme", [1], SamplingParams())
    request = Request(submitted, CacheNamespace("acme", "runtime", None), 0, 0.0, None)
    request.kv = SequenceBlocks.empty(1)
    return ScheduledSequence(request, num_tokens, num_drafts, start, True, None)


MIXED = [(1, 400, 0), (1, 3000, 0), (4, 50, 3), (256, 0, 0), (64, 512, 0)]
"""Of each sequence of a step its tokens, its position and how many of the tokens are drafted."""


def test_a_step_is_divided_by_what_each_request_adds_to_it_and_its_base_equally() -> None:
    costs = make_costs(noise=0.0)
    for _ in range(60):  # what draft tokens cost
        shape = StepShape(0, 8, 2000, 16)
        costs.observe(shape, true_seconds(shape))
    sequences = [scheduled(tokens, start=at, num_drafts=drafts) for tokens, at, drafts in MIXED]
    costs.charge(sequences, 2.0)
    added = []
    for tokens, at, drafts in MIXED:
        known = tokens - drafts
        shape = StepShape(known if known > 1 else 0, int(known == 1), at, drafts)
        added.append(true_seconds(shape) - 0.004 + 0.004 / len(MIXED))
    shares = [sequence.request.step_seconds for sequence in sequences]
    assert sum(shares) == pytest.approx(2.0, rel=1e-12)
    assert shares == pytest.approx([2.0 * each / sum(added) for each in added], rel=0.01)


def test_evicted_tokens_are_not_attended_to_and_not_paid_for() -> None:
    costs = make_costs(noise=0.0)
    long, evicted = scheduled(1, start=4000), scheduled(1, start=4000)
    evicted.request.kv.num_evicted = 3500
    costs.charge([long, evicted], 1.0)
    short = scheduled(1, start=500)
    costs.charge([scheduled(1, start=4000), short], 1.0)
    assert evicted.request.step_seconds == short.request.step_seconds < long.request.step_seconds


def test_the_first_step_is_divided_by_tokens() -> None:
    costs = StepCosts()
    sequences = [scheduled(1, start=9), scheduled(1, start=90), scheduled(2, start=9, num_drafts=1)]
    costs.charge(sequences, 1.0)
    assert [each.request.step_seconds for each in sequences] == [0.25, 0.25, 0.5]
    assert costs.unclaimed_seconds == 0.0


def test_those_who_are_left_pay_for_a_step_and_nobody_if_none_is() -> None:
    costs = make_costs(noise=0.0)
    ended, left = scheduled(1, start=100), scheduled(1, start=100)
    ended.request.is_settled = True
    costs.charge([ended, left], 0.5)
    assert (ended.request.step_seconds, left.request.step_seconds) == (0.0, 0.5)
    left.request.is_settled = True
    costs.charge([ended, left], 0.25)
    assert (ended.request.step_seconds, left.request.step_seconds) == (0.0, 0.5)
    assert costs.unclaimed_seconds == 0.25


def test_a_step_that_no_graph_takes_pays_for_its_launches_too() -> None:
    costs = StepCosts(max_graph_rows=16)
    rng = random.Random(3)
    for _ in range(400):
        shape = random_shape(rng)
        costs.observe(shape, true_seconds(shape) + 0.02 * (shape.num_rows > 16))
    prompt, decode = scheduled(200, start=0), scheduled(1, start=0)
    costs.charge([prompt, decode], 1.0)
    equal = (0.004 + 0.02) / 2
    expected = [equal + 200 * 1e-4, equal + 3e-4]
    shares = [prompt.request.step_seconds, decode.request.step_seconds]
    assert shares == pytest.approx([each / sum(expected) for each in expected], rel=0.02)
