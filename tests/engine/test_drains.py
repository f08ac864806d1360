"""Deleting an adapter lets its running requests finish, until a deadline, and leaves nothing
behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.manager import Tier
from loraplex.engine.messages import (
    AdapterStored,
    DeleteAdapter,
    ExplainAdapter,
    FinishReason,
    Prefetch,
    SetPinned,
)
from loraplex.engine.request_lifecycle import REAP_INTERVAL_SECONDS
from support.engine import LocalEngine
from support.models import make_adapter

PROMPT = list(range(50))


@pytest.fixture(scope="module")
def folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, root / f"{r}", seed=r, r=r) for r in (4, 8)]


class Clock:
    """Moves by a millisecond with each look, and by the test's hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path, clock: Clock) -> Iterator[LocalEngine]:
    engine = LocalEngine(tiny_base, tmp_path, clock=clock)
    yield engine
    engine.close()


def error_code(engine: LocalEngine, request_id: str) -> str | None:
    end = engine.answers[request_id].finished
    assert end is not None
    return end.error.code if end.error else None


def begin(engine: LocalEngine, request_id: str) -> None:
    """Until it has its first token."""
    while not engine.answers[request_id].token_ids:
        engine.step()


def test_running_requests_finish_and_new_ones_are_refused(
    engine: LocalEngine, folders: list[Path]
) -> None:
    doomed, kept = map(engine.add_adapter, folders)
    expected = engine.submit(PROMPT, doomed, max_tokens=20, ignore_eos=True)
    engine.run()
    running = engine.submit(PROMPT, doomed, max_tokens=20, ignore_eos=True)
    begin(engine, running)
    engine.core.handle(DeleteAdapter(doomed, drain_seconds=1000.0))
    late = engine.submit(PROMPT, doomed)
    neighbour = engine.submit(PROMPT, kept, max_tokens=5, ignore_eos=True)
    assert engine.evicted == []
    engine.run()

    assert engine.answers[running].token_ids == engine.answers[expected].token_ids
    assert error_code(engine, running) is None
    assert error_code(engine, late) == "adapter_deleted"
    assert len(engine.answers[neighbour].token_ids) == 5
    assert engine.evicted == [doomed]
    receipt = engine.receipts[0]
    assert (receipt.num_drained, receipt.num_aborted) == (1, 1)
    assert receipt.device_bytes > 0
    assert receipt.host_bytes >= receipt.device_bytes
    assert receipt.seconds > 0
    assert [entry.key for entry in engine.core.stats().adapters] == [kept]


def test_who_waits_for_a_deleted_adapter_ends_at_once(
    tiny_base: Path, folders: list[Path], tmp_path: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, max_num_seqs=1)
    doomed = engine.add_adapter(folders[0])
    running = engine.submit(PROMPT, doomed, max_tokens=10, ignore_eos=True)
    begin(engine, running)
    waiting = engine.submit(PROMPT, doomed)
    engine.core.handle(DeleteAdapter(doomed, drain_seconds=1000.0))
    engine.step()
    assert error_code(engine, waiting) == "adapter_deleted"
    assert engine.answers[running].finished is None
    engine.run()
    end = engine.answers[running].finished
    assert end is not None
    assert end.reason is FinishReason.LENGTH
    assert engine.receipts[0].num_aborted == 1
    engine.close()


def test_the_deadline_ends_the_rest(engine: LocalEngine, folders: list[Path], clock: Clock) -> None:
    doomed = engine.add_adapter(folders[0])
    running = engine.submit(PROMPT, doomed, max_tokens=300, ignore_eos=True)
    begin(engine, running)
    engine.core.handle(DeleteAdapter(doomed, drain_seconds=500.0))
    engine.step()
    assert engine.answers[running].finished is None
    clock.now += 501.0
    engine.step()
    assert error_code(engine, running) == "adapter_deleted"
    engine.run()
    receipt = engine.receipts[0]
    assert (receipt.num_drained, receipt.num_aborted) == (0, 1)
    assert receipt.seconds > 500


def test_a_later_deletion_without_a_drain_shortens_the_deadline(
    engine: LocalEngine, folders: list[Path]
) -> None:
    doomed = engine.add_adapter(folders[0])
    running = engine.submit(PROMPT, doomed, max_tokens=300, ignore_eos=True)
    begin(engine, running)
    engine.core.handle(DeleteAdapter(doomed, drain_seconds=500.0))
    engine.core.handle(DeleteAdapter(doomed))
    engine.run()
    assert error_code(engine, running) == "adapter_deleted"
    assert engine.evicted == [doomed]


def test_what_was_computed_under_a_drained_adapter_is_never_found_again(
    engine: LocalEngine, folders: list[Path]
) -> None:
    doomed = engine.add_adapter(folders[0])
    running = engine.submit(PROMPT, doomed, max_tokens=20, ignore_eos=True)
    begin(engine, running)
    engine.core.handle(DeleteAdapter(doomed, drain_seconds=1000.0))
    engine.run()
    assert engine.evicted == [doomed]
    again = engine.submit(PROMPT, doomed)
    engine.run()
    started = engine.answers[again].started
    assert started is not None
    assert started.num_cached_tokens == 0
    assert started.adapter_tier is Tier.STORE


def test_a_request_hears_how_long_its_adapters_load_took(
    engine: LocalEngine, folders: list[Path]
) -> None:
    adapter = engine.add_adapter(folders[0])
    ids = []
    for key in (adapter, adapter, None):
        ids.append(engine.submit(PROMPT, key))
        engine.run()
    starts = [started for name in ids if (started := engine.answers[name].started)]
    assert [started.adapter_tier for started in starts] == [Tier.STORE, Tier.DEVICE, None]
    loads = [started.adapter_load_ms for started in starts]
    assert loads[0] is not None
    assert loads[0] > 0
    assert loads[1:] == [0.0, None]
    stats = engine.core.stats()
    tiers = stats.adapter_tiers
    assert tiers.num_leases_reaped == tiers.num_leases == 0
    assert {stage: sum(h.counts) for stage, h in tiers.load_seconds.items()} == dict.fromkeys(
        ("fetch", "read", "wait", "copy"), 1
    )
    resident = sum(entry.device_bytes for entry in stats.adapters)
    assert tiers.bytes_by_tier[Tier.DEVICE] == resident > 0


def test_a_lease_that_was_not_given_back_is_reaped_in_time(
    engine: LocalEngine, folders: list[Path], clock: Clock
) -> None:
    adapter = engine.add_adapter(folders[0])
    engine.generate(PROMPT, adapter)
    assert engine.core.parts.tiers.manager.acquire(adapter, "lost") is not None
    engine.step()
    assert engine.core.stats().adapter_tiers.num_leases == 1
    clock.now += REAP_INTERVAL_SECONDS
    engine.step()
    tiers = engine.core.stats().adapter_tiers
    assert (tiers.num_leases, tiers.num_leases_reaped) == (0, 1)


def test_pins_and_prefetches_load_without_a_request_and_are_explained(
    engine: LocalEngine, folders: list[Path]
) -> None:
    pinned, wanted = map(engine.add_adapter, folders)
    engine.core.handle(SetPinned([pinned]))
    engine.core.handle(Prefetch(wanted, 60.0))
    while engine.core.stats().num_adapter_loads < 2:
        engine.step()
    engine.core.handle(ExplainAdapter(pinned))
    engine.step()
    load = engine.explanations[0].load
    assert (load.key, load.state, load.is_pinned) == (pinned, "resident", True)
    assert load.transitions[-1].state == "resident"
    assert engine.core.stats().adapter_tiers.pinned_bytes > 0


def test_a_failed_load_is_explained_with_its_code(engine: LocalEngine, folders: list[Path]) -> None:
    broken = engine.add_adapter(folders[0])
    engine.broken.add(broken)
    engine.submit(PROMPT, broken)
    engine.run()
    engine.core.handle(ExplainAdapter(broken))
    engine.step()
    load = engine.explanations[0].load
    assert load.state == "failed"
    assert load.reason is not None
    assert load.reason.code == "object_not_found"
    assert load.retry_in_seconds is not None
    assert 0 < load.retry_in_seconds <= 0.5


def test_a_lost_block_says_that_no_retry_helps_until_it_is_stored_again(
    engine: LocalEngine, folders: list[Path]
) -> None:
    lost = engine.add_adapter(folders[0])
    engine.broken.add(lost)
    refused = engine.submit(PROMPT, lost)
    engine.run()
    end = engine.answers[refused].finished
    assert end is not None
    error = end.error
    assert error is not None
    assert (error.code, error.is_retryable) == ("adapter_load_failed", False)
    assert "push the same files again" in error.message
    engine.broken.discard(lost)
    engine.core.handle(AdapterStored(lost))
    again = engine.submit(PROMPT, lost)
    engine.run()
    assert error_code(engine, again) is None


def test_residents_answer_while_the_store_is_down(engine: LocalEngine, folders: list[Path]) -> None:
    resident, absent = map(engine.add_adapter, folders)
    expected = engine.generate(PROMPT, resident)
    engine.broken |= {resident, absent}
    ids = [engine.submit(PROMPT, key) for key in (resident, absent) * 3]
    engine.run()
    assert [error_code(engine, name) for name in ids] == [None, "adapter_load_failed"] * 3
    assert engine.tokens(ids[::2]) == [expected] * 3
