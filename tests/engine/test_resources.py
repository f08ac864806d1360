"""What requests have used, said with their ends: together it is what the engine has spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import FinishReason, Resources, Submit
from support.engine import LocalEngine, make_request
from support.models import make_adapter

PROMPT = list(range(40))
BLOCK = 16
STEP_SECONDS = 1.0


class Clock:
    """Goes on with each engine step; within a step it stands."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_engine(base: Path, folder: Path, **settings: object) -> LocalEngine:
    return LocalEngine(base, folder, max_num_seqs=8, dtype="float32", **settings)


@pytest.fixture(params=[False, True], ids=["one step at a time", "a step ahead"])
def engine(
    tiny_base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[LocalEngine]:
    engine = open_engine(tiny_base, tmp_path, async_scheduling=request.param)
    yield engine
    engine.close()


def used_by(engine: LocalEngine, *request_ids: str) -> Resources:
    """The sum, of all requests if none is named."""
    total = Resources()
    for request_id in request_ids or engine.answers:
        total += engine.answers[request_id].end.used
    return total


def submit_with_deadline(engine: LocalEngine, request_id: str, *, seconds: float) -> str:
    request = make_request(request_id, [91, *PROMPT], None, max_tokens=200, ignore_eos=True)
    engine.core.handle(Submit(replace(request, deadline_seconds=seconds)))
    return request_id


def spent_seconds(engine: LocalEngine) -> float:
    """By the counters of the device's utilization."""
    parts = engine.core.parts
    return parts.utilization.snapshot().step_seconds - parts.costs.unclaimed_seconds


def test_the_steps_seconds_are_divided_among_all_requests_however_they_end(
    engine: LocalEngine,
) -> None:
    for number in range(6):
        engine.submit([number, *PROMPT], max_tokens=5 + 3 * number, ignore_eos=True)
        engine.step()
    aborted = engine.submit([90, *PROMPT], max_tokens=200, ignore_eos=True)
    failed = submit_with_deadline(engine, "late", seconds=0.05)
    while not engine.answers[aborted].token_ids:
        engine.step()
    engine.abort(aborted)
    time.sleep(0.05)
    engine.run()
    assert engine.answers[aborted].end.reason is FinishReason.ABORTED
    assert engine.answers[failed].end.reason is FinishReason.ERROR
    assert used_by(engine, aborted).step_seconds > 0
    assert used_by(engine).step_seconds == pytest.approx(spent_seconds(engine))


def test_a_request_that_was_preempted_pays_for_both_computations(
    tiny_base: Path, tmp_path: Path
) -> None:
    clock = Clock()
    engine = open_engine(tiny_base, tmp_path, clock=clock, kv_cache_bytes=160_000)
    num_blocks = engine.core.parts.kv.num_usable(0)
    length = num_blocks * BLOCK // 2
    for number in range(3):
        engine.submit([number, *PROMPT], max_tokens=length - 41, ignore_eos=True)
    while engine.core.has_work:
        engine.step()
        clock.now += STEP_SECONDS
    assert engine.core.stats().num_preemptions
    parts = engine.core.parts
    assert parts.kv.num_free(0) == num_blocks
    held = used_by(engine).kv_byte_seconds / parts.plan.kv_block_bytes[0]
    assert 0 < held <= num_blocks * clock.now, "no block is held twice"
    engine.close()


def test_requests_that_share_a_prefix_share_what_its_blocks_cost(
    tiny_base: Path, tmp_path: Path
) -> None:
    clock = Clock()
    engine = open_engine(tiny_base, tmp_path, clock=clock, async_scheduling=False)
    prompt = list(range(2 * BLOCK))
    engine.submit([*prompt, 1], max_tokens=1)
    engine.run()
    ids = [engine.submit([*prompt, 2 + each], max_tokens=8, ignore_eos=True) for each in range(2)]
    block_bytes = engine.core.parts.plan.kv_block_bytes[0]
    for _ in range(8):
        engine.step()
        clock.now += STEP_SECONDS
    engine.run()
    # For seven steps: two shared blocks, of which each has one's worth, and one of its own.
    assert [engine.answers[each].end.used.kv_byte_seconds for each in ids] == pytest.approx(
        [7 * STEP_SECONDS * 2 * block_bytes] * 2
    )
    assert engine.answers[ids[0]].started
    engine.close()


def test_an_adapters_load_is_charged_once_to_the_first_request_that_uses_it(
    engine: LocalEngine, tiny_base: Path, tmp_path: Path
) -> None:
    make_adapter(tiny_base, tmp_path / "adapter", seed=1)
    key: AdapterKey = engine.add_adapter(tmp_path / "adapter")
    ids = [engine.submit([each, *PROMPT], key, max_tokens=3) for each in range(3)]
    plain = engine.submit(PROMPT, max_tokens=3)
    engine.run()
    (status,) = engine.core.stats().adapters
    assert status.device_bytes > 0
    assert used_by(engine, *ids).loaded_bytes == status.device_bytes
    assert used_by(engine, *ids).fetched_bytes == status.device_bytes, "the store had it alone"
    assert used_by(engine, plain).loaded_bytes == 0


def test_a_request_that_never_ran_has_used_nothing(engine: LocalEngine) -> None:
    too_long = engine.submit(PROMPT, max_tokens=10**6)
    late = submit_with_deadline(engine, "late", seconds=0.0)
    engine.run()
    assert used_by(engine, too_long) == used_by(engine, late) == Resources()
