"""Draft tokens in a step that others share."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from loraplex.engine.messages import LatencyTargets
from loraplex.engine.request import Request
from loraplex.engine.scheduling.batch import ScheduledBatch
from loraplex.engine.scheduling.draft_policy import NoDrafts
from loraplex.engine.scheduling.step_costs import StepShape
from support.scheduling import BLOCK, SchedulerBench


class Wanting(NoDrafts):
    """Wants as many draft tokens for every request."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def plan(self, decodes: Collection[Request], num_free_tokens: int) -> Mapping[Request, int]:
        return dict.fromkeys(decodes, self.num_tokens)


def drafting(num_tokens: int, **settings: object) -> SchedulerBench:
    bench = SchedulerBench(**settings)  # type: ignore[arg-type]
    bench.scheduler._drafts = Wanting(num_tokens)
    return bench


def numbers(batch: ScheduledBatch | None) -> dict[str, tuple[int, int]]:
    """By request its tokens in the step, and how many of them are drafted."""
    assert batch is not None
    return {it.request.request_id: (it.num_tokens, it.num_draft_tokens) for it in batch.sequences}


def test_drafts_fill_a_step_but_leave_a_waiting_prompt_a_block_and_the_last_token_alone() -> None:
    bench = drafting(100, budget=32)
    bench.add("long", 4, max_tokens=200)
    bench.add("short", 4, max_tokens=5)
    bench.step()
    assert numbers(bench.step()) == {"long": (31, 30), "short": (1, 0)}
    bench.scheduler._drafts = Wanting(3)
    assert numbers(bench.step()) == {"long": (4, 3), "short": (3, 2)}
    bench.scheduler._drafts = Wanting(100)
    bench.add("prompt", 60)
    batch = bench.step()
    assert numbers(batch)["prompt"] == (BLOCK, 0)
    assert batch is not None
    assert batch.num_tokens == 32
    assert batch.shape.num_draft_tokens == 32 - BLOCK - 2


def test_the_time_of_drafts_counts_against_the_target_that_bounds_prompts() -> None:
    def chunk_beside(num_draft_tokens: int) -> int:
        bench = drafting(num_draft_tokens, num_blocks=400, budget=256, target_itl_seconds=0.03)
        for size in range(1, 200):
            drafted = size % 7
            bench.costs.observe(StepShape(size, 4, 100, drafted), 0.01 + (size + drafted) * 1e-3)
        bench.add("decoding", 4, max_tokens=300)
        bench.step()
        bench.add("prompt", 600)
        return numbers(bench.step())["prompt"][0]

    assert BLOCK < chunk_beside(8) <= chunk_beside(0) - 6


@pytest.mark.parametrize(
    ("target", "least", "most"), [(0.03, 10, 30), (0.5, 200, 200), (0.001, 0, 0)]
)
def test_drafts_take_no_more_of_a_step_than_the_strictest_decode_allows(
    target: float, least: int, most: int
) -> None:
    bench = drafting(100, num_blocks=400, budget=256)
    for size in range(1, 200):
        drafted = size % 7
        bench.costs.observe(StepShape(size, 4, 100, drafted), 0.01 + (size + drafted) * 1e-3)
    bench.add("patient", 4, max_tokens=300)
    bench.add("strict", 4, max_tokens=300, targets=LatencyTargets(None, target))
    bench.step()
    batch = bench.step()
    assert batch is not None
    assert least <= batch.shape.num_draft_tokens <= most


def test_a_single_draft_token_is_verified_too() -> None:
    bench = drafting(1)
    bench.add("a", 4, max_tokens=9)
    bench.step()
    assert numbers(bench.step()) == {"a": (2, 1)}


def test_where_no_token_more_fits_nothing_is_drafted() -> None:
    bench = drafting(9, num_blocks=2)
    for name in ("first", "second"):
        bench.add(name, BLOCK - 1, max_tokens=5)
    bench.step()
    assert numbers(bench.step()) == dict.fromkeys(("first", "second"), (1, 0))


@pytest.mark.parametrize("num_accepted", [0, 2, 3, 9])
@pytest.mark.parametrize("prompt", range(BLOCK, 2 * BLOCK))
def test_behind_the_accepted_tokens_a_request_keeps_room_for_the_next_one_only(
    prompt: int, num_accepted: int
) -> None:
    bench = drafting(9)
    request = bench.add("a", prompt, max_tokens=50)
    bench.step()
    batch = bench.scheduler.schedule().batch
    assert batch is not None
    (sequence,) = batch.sequences
    assert sequence.num_draft_tokens == 9
    bench.scheduler.take([(sequence, [0] * (num_accepted + 1), num_accepted)])
    assert request.num_computed_tokens == prompt + 1 + num_accepted
    num_blocks = len(request.kv.tables[0])
    assert 0 <= num_blocks * BLOCK - request.num_computed_tokens <= BLOCK
    bench.kv.check_integrity([request.kv])


def test_drafts_without_blocks_are_cut_to_those_that_their_request_has() -> None:
    bench = drafting(9, num_blocks=4)
    for name in ("first", "second"):
        bench.add(name, BLOCK, max_tokens=11)
    bench.step()
    batch = bench.step()
    assert numbers(batch) == dict.fromkeys(("first", "second"), (BLOCK, BLOCK - 1))
    assert batch is not None
    assert batch.shape.num_draft_tokens == 2 * (BLOCK - 1)
