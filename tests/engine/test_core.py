"""The engine as a whole: the batch's composition must not matter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.execution.runner import StepOutput
from loraplex.engine.execution.sampler import sample_tokens
from loraplex.engine.messages import (
    Abort,
    DeleteAdapter,
    FinishReason,
    GenerationRequest,
    LatencyTargets,
    Submit,
)
from loraplex.engine.model.linear import ProjectionSlice
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.step_costs import StepCosts
from support.canaries import MARKERS, make_canary_adapter, make_canary_base
from support.engine import LocalEngine
from support.greedy import parts_at_near_tie
from support.models import make_adapter

NEAR_TIE = 1e-4
"""Logit gap under which rounding may decide the greedy token; such positions are skipped."""


@pytest.fixture(scope="module")
def adapter_folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    ranks = (1, 3, 4, 8, 16, 32)
    # At twice the scale fp32 and fp64 differ by up to 7e-4 in a logprob of rank 1, and ties that
    # rounding decides are not near; at this one by 2.5e-5 at any rank.
    return [make_adapter(tiny_base, root / f"{r}", seed=r, r=r, scale=0.1) for r in ranks]


@pytest.fixture
def engine(tiny_base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(tiny_base, tmp_path)
    yield engine
    engine.close()


def random_prompt(rng: random.Random, low: int = 1, high: int = 60) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(low, high))]


@pytest.mark.parametrize(
    ("swap_bytes", "is_async"),
    [
        (1 << 20, False),
        (0, True),
        pytest.param(0, False, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_do_not_depend_on_what_shares_the_batch(
    tiny_base: Path,
    adapter_folders: list[Path],
    tmp_path: Path,
    swap_bytes: int,
    is_async: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, mixed, chunked, prefix-hit, forked, preempted, swapped: the same tokens."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    alone = LocalEngine(tiny_base, tmp_path, prefix_caching=False)
    crowded = LocalEngine(
        tiny_base,
        tmp_path,
        kv_cache_bytes=40 * 8192,
        max_num_batched_tokens=48,
        max_num_seqs=12,
        swap_bytes=swap_bytes,
        async_scheduling=is_async,
    )
    rng = random.Random(5)
    keys = [alone.add_adapter(folder) for folder in adapter_folders]
    assert [crowded.add_adapter(folder) for folder in adapter_folders] == keys
    for key in keys:  # so that nobody waits for a load, and the pool is too small for all at once
        crowded.generate([1], key)
    system = random_prompt(rng, 40, 40)
    cases = []
    for _ in range(40):
        shared = system if rng.random() < 0.5 else []
        prompt = [*shared, *random_prompt(rng)]
        cases.append((prompt, rng.choice([None, *keys]), rng.randint(1, 30)))
    ids = []
    for number, (prompt, adapter, max_tokens) in enumerate(cases):
        ids.append(
            [
                crowded.submit(
                    prompt,
                    adapter,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    group_id=f"g{number}",
                    priority=-number % 3,
                )
                for _ in range(rng.choice([1, 1, 3]))
            ]
        )
        for _ in range(rng.randint(0, 3)):
            crowded.step()
    crowded.run()

    num_near_ties = 0
    for (prompt, adapter, max_tokens), request_ids in zip(cases, ids, strict=True):
        reference = alone.submit(prompt, adapter, max_tokens=max_tokens, ignore_eos=True)
        alone.run()
        expected = alone.answers[reference].token_ids
        for actual in crowded.tokens(request_ids):
            assert len(actual) == max_tokens
            if actual != expected:
                assert parts_at_near_tie(
                    alone, prompt, adapter, expected=expected, actual=actual, gap=NEAR_TIE
                )
                num_near_ties += 1

    assert num_near_ties <= 3
    stats = crowded.core.stats()
    assert crowded.core.parts.scheduler.num_forks > 0, "groups were meant to fork"
    assert crowded.core.parts.scheduler.num_displaced > 0, "the urgent were meant to displace"
    assert bool(crowded.core.parts.scheduler.num_swaps) == bool(swap_bytes)
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert stats.num_cached_tokens > 0, "the shared beginning was meant to be reused"
    assert stats.num_free_kv_blocks == crowded.core.info.num_kv_blocks, "blocks leaked"
    assert all(adapter.num_leases == 0 for adapter in stats.adapters), "leases leaked"
    alone.close()
    crowded.close()


@pytest.mark.slow
def test_canary_adapters_never_answer_for_each_other(tmp_path: Path) -> None:
    base = make_canary_base(tmp_path / "base")
    markers = MARKERS[:24]
    probe = LocalEngine(base, tmp_path)
    first = make_canary_adapter(base, tmp_path / "first", marker=markers[0])
    block_bytes = probe.examine(first, tmp_path / "probe.block").size_bytes
    probe.close()
    engine = LocalEngine(
        base,
        tmp_path,
        arena_bytes=6 * block_bytes,
        host_cache_bytes=12 * block_bytes,
        max_num_seqs=16,
        loader_duty=1.0,
    )
    keys = {
        engine.add_adapter(
            make_canary_adapter(base, tmp_path / f"{marker}", marker=marker, rank=1 + marker % 4),
            f"tenant-{marker % 5}",
        ): marker
        for marker in markers
    }
    rng = random.Random(3)
    expected: dict[str, int | None] = {}
    for number in range(1000):
        if number % 100 == 0:
            engine.run()  # waves: how much is paged must not depend on how fast loads are
        adapter = rng.choice([None, *keys, *list(keys)[:4]])
        request_id = engine.submit(
            random_prompt(rng, 1, 40), adapter, max_tokens=rng.randint(1, 4), ignore_eos=True
        )
        expected[request_id] = keys[adapter] if adapter else None
        if rng.random() < 0.05:
            engine.core.handle(Abort(rng.choice(list(expected))))
        for _ in range(rng.randint(0, 2)):
            engine.step()
    engine.run()

    foreign = 0
    for request_id, marker in expected.items():
        answer = engine.answers[request_id]
        assert answer.finished is not None
        said = set(answer.token_ids) & set(markers)
        foreign += bool(said - {marker})
        if marker is not None and answer.finished.reason is not FinishReason.ABORTED:
            assert set(answer.token_ids) == {marker}
    assert foreign == 0
    stats = engine.core.stats()
    assert stats.num_adapter_evictions > 100, "more adapters than fit were meant to be paged"
    engine.close()


def test_an_adapter_that_overflows_leaves_its_neighbours_unchanged(
    engine: LocalEngine, tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    loud = make_adapter(tiny_base, tmp_path / "loud", seed=1, scale=1e18)
    good, overflowing = engine.add_adapter(adapter_folders[3]), engine.add_adapter(loud)
    prompt = list(range(40))
    expected = [engine.generate(prompt, good), engine.generate(prompt)]

    ids = [
        engine.submit(prompt, adapter)
        for adapter in (good, overflowing, None, overflowing, good, None)
    ]
    engine.run()

    reasons = [engine.answers[request_id].finished for request_id in ids]
    assert [end and end.error and end.error.code for end in reasons] == [
        None,
        "numerical_error",
        None,
        "numerical_error",
        None,
        None,
    ]
    answers = engine.tokens(ids)
    assert answers[0] == answers[4] == expected[0]
    assert answers[2] == answers[5] == expected[1]
    again = engine.submit(prompt, overflowing)
    engine.run()
    started = engine.answers[again].started
    assert started is not None
    assert started.num_cached_tokens == 0, "blocks of a failed request were published"


def test_a_chunk_that_overflows_inside_a_prompt_is_not_reused(
    tiny_base: Path, tmp_path: Path
) -> None:
    """The token that overflows comes in an early chunk; nothing of that chunk may be published."""
    engine = LocalEngine(tiny_base, tmp_path, max_num_batched_tokens=64, max_num_seqs=8)
    engine.core.parts.base.model.get_input_embeddings().weight[77] = float("inf")
    prefix = list(range(48))
    expected = engine.submit([*prefix, 5], cache_namespace="reference")
    poisoned = engine.submit([*prefix, 77, *range(40)])
    engine.run()
    end = engine.answers[poisoned].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == "numerical_error"

    clean = engine.submit([*prefix, 5])
    engine.run()

    assert engine.answers[clean].token_ids == engine.answers[expected].token_ids
    assert len(engine.answers[clean].token_ids) > 0
    engine.close()


def test_prefix_reuse_stays_within_tenant_adapter_and_label(
    engine: LocalEngine, adapter_folders: list[Path]
) -> None:
    mine = engine.add_adapter(adapter_folders[2], "acme")
    same_bytes = engine.add_adapter(adapter_folders[2], "globex")
    other = engine.add_adapter(adapter_folders[3], "acme")
    assert mine.digest == same_bytes.digest
    prompt = list(range(100))

    def cached_tokens(adapter: AdapterKey | None, tenant_id: str = "acme") -> int:
        request_id = engine.submit(prompt, adapter, tenant_id=tenant_id)
        engine.run()
        started = engine.answers[request_id].started
        assert started is not None
        return started.num_cached_tokens

    assert cached_tokens(mine) == 0
    assert cached_tokens(mine) == 96
    assert cached_tokens(same_bytes) == 0
    assert cached_tokens(other) == 0
    assert cached_tokens(None, "acme") == 0
    assert cached_tokens(None, "globex") == 0
    assert cached_tokens(None, "globex") == 96


def test_evicting_an_adapter_ends_its_requests_and_forgets_its_weights_and_kv(
    engine: LocalEngine, adapter_folders: list[Path]
) -> None:
    doomed = engine.add_adapter(adapter_folders[3])
    kept = engine.add_adapter(adapter_folders[4])
    engine.generate(list(range(50)), doomed)
    running = engine.submit(list(range(50)), doomed, max_tokens=100, ignore_eos=True)
    neighbour = engine.submit(list(range(50)), kept, max_tokens=20, ignore_eos=True)
    engine.step()

    engine.core.handle(DeleteAdapter(doomed))
    engine.run()

    end = engine.answers[running].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == "adapter_deleted"
    assert engine.evicted == [doomed]
    assert len(engine.answers[neighbour].token_ids) == 20
    assert [entry.key for entry in engine.core.stats().adapters] == [kept]
    assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks


def test_a_failed_fetch_fails_only_the_requests_that_need_it(
    engine: LocalEngine, adapter_folders: list[Path]
) -> None:
    broken = engine.add_adapter(adapter_folders[0])
    good = engine.add_adapter(adapter_folders[1])
    engine.broken.add(broken)
    ids = [engine.submit([1, 2, 3], adapter) for adapter in (broken, good, None, broken)]
    engine.run()
    codes = [
        end.error.code if (end := engine.answers[i].finished) and end.error else None for i in ids
    ]
    assert codes == ["adapter_load_failed", None, None, "adapter_load_failed"]


def test_an_adapter_larger_than_the_arena_is_refused_by_name(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    engine = LocalEngine(tiny_base, tmp_path, arena_bytes=16 << 10)
    small, huge = engine.add_adapter(adapter_folders[0]), engine.add_adapter(adapter_folders[5])
    ids = [engine.submit([1, 2, 3], adapter) for adapter in (small, huge)]
    engine.run()
    codes = [
        end.error.code if (end := engine.answers[i].finished) and end.error else None for i in ids
    ]
    assert codes == [None, "adapter_too_large"]
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ([], {}, "invalid_parameter"),
        ([1, 10_000], {}, "invalid_parameter"),
        ([1, -1], {}, "invalid_parameter"),
        ([1], {"logit_bias": {10_000: 1.0}}, "invalid_parameter"),
        ([1] * 510, {"max_tokens": 3}, "context_length_exceeded"),
    ],
)
def test_a_request_that_cannot_run_ends_with_its_code(
    engine: LocalEngine, prompt: list[int], sampling: dict[str, Any], code: str
) -> None:
    request_id = engine.submit(prompt, **sampling)
    engine.run()
    end = engine.answers[request_id].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == code


def test_a_ttft_target_refuses_what_its_tenants_others_keep_waiting(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = LocalEngine(
        tiny_base, tmp_path, max_num_seqs=1, target_ttft_ms=1.0, target_itl_ms=500.0
    )
    assert engine.core.info.latency_targets == LatencyTargets(0.001, 0.5)
    engine.submit([1, 2, 3], max_tokens=40, ignore_eos=True)
    engine.run()  # what steps cost and how long outputs are is known
    running, waiting, refused = (_submit_and_step(engine, "loud") for _ in range(3))
    quiet = _submit_and_step(engine, "quiet")
    engine.run()
    end = engine.answers[refused].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == "overloaded"
    assert end.error.retry_after_seconds == 1.0
    assert all(engine.tokens([running, waiting, quiet]))
    engine.close()


def _submit_and_step(engine: LocalEngine, tenant_id: str) -> str:
    request_id = engine.submit([1, 2, 3], tenant_id=tenant_id, max_tokens=40, ignore_eos=True)
    engine.step()
    return request_id


def test_the_first_token_id_beyond_the_vocabulary_is_refused_and_the_last_one_served(
    engine: LocalEngine,
) -> None:
    size = engine.core.info.vocab_size
    served = engine.submit([1, size - 1], max_tokens=1, logit_bias={size - 1: -1.0})
    refused = [engine.submit([1, size]), engine.submit([1], logit_bias={size: -1.0})]
    engine.run()
    errors = [engine.answers[request_id].end.error for request_id in (served, *refused)]
    assert [error and error.code for error in errors] == [None, *["invalid_parameter"] * 2]


def test_a_step_that_fails_midway_leaves_no_inputs_in_its_layers(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.core.parts.runner
    slices = [it for it in runner._base.model.modules() if isinstance(it, ProjectionSlice)]

    def fail(*_: object) -> None:
        assert any(part.fused._input is not None for part in slices)
        raise MemoryError

    (second,) = {part for part in slices[:2] if part.index == 1}
    monkeypatch.setattr(second, "forward", fail)
    engine.submit([1, 2, 3])
    engine.run()
    assert all(part.fused._input is None for part in slices)


def test_an_exception_in_a_step_ends_the_request_that_causes_it_and_no_other(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(20))
    expected = engine.generate(prompt)
    run = engine.core.parts.runner.run

    def fail_on_poison(sequences: Any, sampled: Any) -> StepOutput:
        if any(7 in sequence.request.submitted.sampling.logit_bias for sequence in sequences):
            raise RuntimeError("a defect that this request triggers")
        return run(sequences, sampled)

    monkeypatch.setattr(engine.core.parts.runner, "run", fail_on_poison)
    good = engine.submit(prompt)
    poison = engine.submit(prompt, logit_bias={7: 1.0})
    engine.run()
    assert engine.answers[good].token_ids == expected
    end = engine.answers[poison].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == "engine_error"
    assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks


def test_a_request_that_breaks_sampling_ends_alone(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(20))
    expected = engine.generate(prompt)

    def fail_on_poison(logits: torch.Tensor, rows: Any) -> torch.Tensor:
        if any(7 in row.params.logit_bias for row in rows):
            raise RuntimeError("a defect that this request triggers")
        return sample_tokens(logits, rows)

    monkeypatch.setattr("loraplex.engine.next_tokens.sample_tokens", fail_on_poison)
    ids = [engine.submit(prompt), engine.submit(prompt, logit_bias={7: 1.0}), engine.submit(prompt)]
    engine.run()
    assert engine.answers[ids[0]].token_ids == engine.answers[ids[2]].token_ids == expected
    end = engine.answers[ids[1]].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == "engine_error"


def test_a_request_id_in_use_is_left_to_its_first_owner(engine: LocalEngine) -> None:
    prompt = list(range(20))
    expected = engine.generate(prompt)
    first = engine.submit(prompt, request_id="same")
    engine.step()
    request = GenerationRequest("same", "globex", [1, 2, 3], SamplingParams(temperature=0.0))
    engine.core.handle(Submit(request))
    engine.run()
    assert engine.answers[first].token_ids == expected


def test_the_end_of_sequence_and_stop_tokens_end_a_request(engine: LocalEngine) -> None:
    prompt = list(range(20))
    answer = engine.generate(prompt)
    stop = answer[5]
    request_id = engine.submit(prompt, stop_token_ids=(stop,))
    engine.run()
    end = engine.answers[request_id].finished
    assert end is not None
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert engine.answers[request_id].token_ids == answer[: answer.index(stop) + 1]


def test_an_abort_frees_a_request_in_any_state_and_twice_does_no_harm(
    engine: LocalEngine, adapter_folders: list[Path]
) -> None:
    adapter = engine.add_adapter(adapter_folders[2])
    waiting = engine.submit([1, 2, 3], adapter)
    running = engine.submit([1, 2, 3], max_tokens=50, ignore_eos=True)
    engine.step()
    for request_id in (waiting, running, running, "unknown"):
        engine.core.handle(Abort(request_id))
    engine.run()
    for request_id in (waiting, running):
        end = engine.answers[request_id].finished
        assert end is not None
        assert end.reason is FinishReason.ABORTED
    assert engine.core.stats().num_free_kv_blocks == engine.core.info.num_kv_blocks
    assert not engine.core.has_work


def test_adapters_at_work_are_told_from_a_lease_that_went_stale(
    engine: LocalEngine, adapter_folders: list[Path]
) -> None:
    adapter = engine.add_adapter(adapter_folders[2])
    request_id = engine.submit([1, 2, 3], adapter, max_tokens=50, ignore_eos=True)
    while not engine.answers[request_id].token_ids:
        engine.step()
    request = engine.core.parts.scheduler.get(request_id)
    assert request is not None
    assert request.lease is not None
    request.lease = request.lease._replace(generation=request.lease.generation + 1)
    engine.run()
    end = engine.answers[request_id].finished
    assert end is not None
    assert end.error is not None
    assert end.error.code == "stale_extent"
