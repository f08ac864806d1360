"""The benchmarks run, compare equal work, and print one line of JSON; speed is not checked."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from benchmarks.timed_engine import SMOKE_SHAPE, make_model

from benchmarks import (
    bench_adapter_heads,
    bench_adapter_load,
    bench_agent,
    bench_batching,
    bench_cold_load,
    bench_drafts,
    bench_fairness,
    bench_fleet_fairness,
    bench_handover,
    bench_many_adapters,
    bench_mixed_step,
    bench_paging,
    bench_pipeline,
    bench_prefix,
    bench_prompts,
    bench_quantized_drafts,
    bench_quantized_serving,
    bench_rank_sums,
    bench_skipped_layers,
    bench_speculation,
    bench_suffix,
    bench_target_itl,
    drawn_base,
    gpu_check,
)
from loraplex.engine.config import Quantization
from loraplex.engine.scheduling.step_costs import StepCosts
from support.engine import LocalEngine
from support.grammars import needs_llguidance

BENCHMARKS = {
    "batching": bench_batching,
    "prefix": bench_prefix,
    "paging": bench_paging,
    "pipeline": bench_pipeline,
    "rank-sums": bench_rank_sums,
    "target-itl": bench_target_itl,
    "fairness": bench_fairness,
    "many-adapters": bench_many_adapters,
    "mixed-step": bench_mixed_step,
    "prompts": bench_prompts,
    "adapter-load": bench_adapter_load,
    "speculation": bench_speculation,
    "suffix": bench_suffix,
    "drafts": bench_drafts,
    "adapter-heads": bench_adapter_heads,
    "quantized-drafts": bench_quantized_drafts,
    "skipped-layers": bench_skipped_layers,
    "handover": bench_handover,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def run(benchmark: ModuleType, models: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON that a smoke run prints last, below a table of the same rows."""
    assert benchmark.main(["--smoke", "--models", str(models)]) == 0
    table, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    report: dict[str, Any] = json.loads(last)
    header, *lines = table.splitlines()
    assert all(name in header for name in report["rows"][0])
    for line, row in zip(lines, report["rows"], strict=False):
        first = next(iter(row.values()))
        assert line.startswith(f"{first:.4g}" if isinstance(first, float) else str(first))
    return report


@pytest.mark.parametrize("name", BENCHMARKS)
def test_both_arms_give_the_same_tokens_and_every_figure_is_one(
    name: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(BENCHMARKS[name], models, capsys)

    assert report["benchmark"] == name
    assert report["requests_answered_differently"] == 0
    assert_every_figure_is_one(report)


def assert_every_figure_is_one(report: dict[str, Any]) -> None:
    figures = [value for row in report["rows"] for value in row.values()]
    figures += report.values()
    numbers = [value for value in figures if isinstance(value, int | float)]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)


def test_the_stages_of_a_cold_load_bound_what_a_start_by_layers_saves(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(bench_cold_load, models, capsys)
    assert_every_figure_is_one(report)
    for row in report["rows"] + report["on_an_h200"]:
        stages = [row[f"{name}, ms"] for name in ("fetch", "read", "copy", "chunk")]
        assert 0 < row["after the fetch saves"] <= row["by layers saves"]
        assert row["by layers saves"] * sum(stages) < min(stages[-1], sum(stages[:-1]))
        assert row["read while fetched saves"] * sum(stages) < min(stages[:2])
        assert 0 < row["from the host saves"] * sum(stages[2:]) < min(stages[2:])
    small, large = report["rows"]
    per_rank = bench_cold_load.elements_per_rank(SMOKE_SHAPE) * bench_cold_load.ELEMENT_BYTES
    num_bytes = (large["MB"] - small["MB"]) * 1e6
    assert num_bytes == pytest.approx((large["rank"] - small["rank"]) * per_rank, rel=0.01)


def test_the_larger_bases_have_the_published_sizes() -> None:
    for shape, published in (
        (bench_cold_load.LLAMA_8B, 8_030_261_248),
        (bench_cold_load.LLAMA_70B, 70_553_706_496),
    ):
        ends = 2 * shape.vocab_size * shape.hidden_size
        norms = (2 * shape.num_layers + 1) * shape.hidden_size
        assert bench_cold_load.linear_parameters(shape) + ends + norms == published


def test_a_flood_of_four_replicas_is_beside_equal_shares(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose requests differ, so their tokens are not compared."""
    report = run(bench_fleet_fairness, models, capsys)
    equal, flood = report["rows"]
    assert_every_figure_is_one(report)
    assert report["flood_p99_over_equal"] == pytest.approx(
        flood["TTFT p99, steps"] / equal["TTFT p99, steps"]
    )


def test_quantized_weights_are_beside_dense_ones(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which give other tokens."""
    dense, *quantized = run(bench_quantized_serving, models, capsys)["rows"]
    assert dense["weights"] == "dense"
    assert [row["weights"] for row in quantized] == ["int8", "int4"]
    for figure in bench_quantized_serving.FIGURES:
        assert dense[f"{figure}, ratio"] == 1
        for row in quantized:
            assert 0 < row[figure] < math.inf
            assert row[f"{figure}, ratio"] == pytest.approx(row[figure] / dense[figure])


def test_the_prefix_benchmark_reuses_the_shared_prompt_in_one_arm_only(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)  # whatever was measured
    monkeypatch.setattr(StepCosts, "read_seconds", lambda *_: 0.0)
    report = run(bench_prefix, models, capsys)
    assert report["cached_tokens_without"] == 0
    assert report["cached_tokens_with"] == report["shared_tokens"] // 16 * 16
    assert report["requests_answered_differently"] == 0
    num_prompts, length = bench_prefix.SMOKE.num_host_prompts, report["host_prompt_tokens"]
    assert 0 < report["tokens_from_host"] <= num_prompts * length
    assert 0 < report["blocks_from_disk"] <= num_prompts * length // 16
    assert report["host_ttft_ratio"] == report["rows"][-2]["ratio"]
    assert report["disk_ttft_ratio"] == report["rows"][-1]["ratio"]


def test_the_benchmark_of_an_agent_computes_its_context_once_with_activated_adapters(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(bench_agent, models, capsys)
    assert_every_figure_is_one(report)
    plain, activated = (row["computed"] for row in report["rows"])
    assert plain - activated >= report["context_tokens"] // 16 * 16 * (report["adapters"] - 1)


@pytest.mark.parametrize("wrong_run", [2, 5], ids=["of the first run", "of a later run"])
def test_the_benchmark_of_many_adapters_fails_if_an_answer_differs_beyond_a_near_tie(
    wrong_run: int,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three turns of both arms, of which the first is not compared."""
    plan = replace(bench_many_adapters.SMOKE, num_runs=2, rooms=(8,), catalog_sizes=(2,))
    monkeypatch.setattr(bench_many_adapters, "SMOKE", plan)
    tokens, runs = LocalEngine.tokens, count()

    def wrong_once(engine: LocalEngine, request_ids: Iterable[str]) -> list[list[int]]:
        first, *others = tokens(engine, request_ids)
        if next(runs) == wrong_run:
            first = [(first[0] + 1) % plan.shape.vocab_size, *first[1:]]
        return [first, *others]

    monkeypatch.setattr(LocalEngine, "tokens", wrong_once)
    assert bench_many_adapters.main(["--smoke", "--models", str(models)]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["requests_answered_differently"] == 1


def test_the_paging_benchmark_runs_no_more_than_was_reserved_in_one_arm_and_more_in_the_other(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(bench_paging, models, capsys)
    reserved, paged = report["rows"]
    assert reserved["most"] == bench_paging.SMOKE.num_reserved
    assert reserved["preemptions"] == 0
    assert paged["most"] > reserved["most"]


@needs_llguidance
def test_the_grammars_benchmark_measures_steps_and_compiling(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import bench_grammars

    assert bench_grammars.main(["--smoke", "--models", str(models)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = report["rows"]
    assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    compiling = report["compiling_at_the_largest_vocabulary"]
    assert {entry["grammar"] for entry in compiling} == set(bench_grammars.GRAMMARS)
    assert all(entry["compile_ms"] > 0 for entry in compiling)


def test_padding_makes_a_batch_as_long_as_its_longest() -> None:
    trace = bench_batching.make_trace(bench_batching.SMOKE)
    padded = bench_batching.pad(trace, Random(1), bench_batching.SMOKE.shape)
    lengths = {(len(order.prompt), order.num_output_tokens) for order in padded}
    assert lengths == {
        (
            max(len(order.prompt) for order in trace),
            max(order.num_output_tokens for order in trace),
        )
    }


@pytest.mark.parametrize("quantization", Quantization)
def test_a_drawn_base_is_quantized_as_a_checkpoint_is(
    quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(bench_mixed_step.SMOKE.shape, hidden_size=128, intermediate_size=256)
    monkeypatch.setattr(drawn_base, "LARGE_SHAPE", shape)
    plan = replace(bench_mixed_step.SMOKE, shape=shape, quantization=quantization)
    rows, facts = bench_mixed_step.compare(plan, tmp_path, tmp_path, device="cpu")
    assert not list(tmp_path.glob("base-*")), "no checkpoint was written"
    assert len(rows) == len(bench_mixed_step.ARMS) * len(plan.batches)
    heads, linears = 128 * 512, 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    of_weight = {"none": 4, "int8": 1, "fp8": 1, "int4": 0.5, "nf4": 0.53, "mxfp4": 0.56}
    weight_bytes = 4 * heads + linears * of_weight[quantization]
    found = facts["weight_bytes"]
    assert isinstance(found, int)
    assert weight_bytes < found < 1.1 * weight_bytes, "norms and scales beside"


def test_a_step_that_computes_prompts_takes_all_of_them(tmp_path: Path) -> None:
    plan = bench_prompts.SMOKE
    engine = bench_prompts.open_engine(
        plan, make_model(tmp_path, plan.shape), tmp_path, device="cpu"
    )
    bench_prompts.measure(plan, engine)
    num_steps = engine.core.stats().num_steps
    bench_prompts.serve(plan, engine, 8, [None] * plan.most_prompts)
    assert engine.core.stats().num_steps == num_steps + 1
    # Two linear layers' worth of products per layer and token, and the head once a prompt.
    per_token = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert engine.prompt_flops(2, 8) == 2 * (16 * per_token + 2 * 64 * 512)


def test_drafts_of_a_certain_drawn_base_hold_as_often_as_they_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn_base, "LARGE_SHAPE", SMOKE_SHAPE)
    plan = replace(
        bench_speculation.CUDA,
        shape=SMOKE_SHAPE,
        full_batch_sizes=(2,),
        full_tokens=40,
        full_rounds=1,
        cost_batch_sizes=(2,),
        cycles=1,
    )
    with drawn_base.base_of(SMOKE_SHAPE, tmp_path, device="cpu", is_certain=True) as model:
        right, wrong = bench_speculation.full(plan, model, tmp_path, "cpu")
        (cost,) = bench_speculation.verification_costs(plan, model, tmp_path, "cpu")
    assert right.races[0].speculative.mean_accepted_length > 2
    assert wrong.races[0].speculative.mean_accepted_length < 1.1
    assert {race.num_different for race in (*right.races, *wrong.races)} == {0}
    assert set(cost) == {"batch", "ms with none", *(f"{n} draft tokens" for n in plan.draft_sizes)}


def test_gpu_check_tells_of_each_part_when_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def first(folder: Path, _told: Namespace) -> dict[str, Any]:
        assert folder.is_dir()
        return {"ok": True}

    def second(_folder: Path, _told: Namespace) -> dict[str, Any]:
        ended.append(json.loads(capsys.readouterr().err))
        return {"ok": False}

    parts = {"serving": first, "features": second}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--parts", *parts])
    assert gpu_check.main() == 1, "a check that does not hold"
    assert ended == [{"serving": {"ok": True}}]
    assert json.loads(capsys.readouterr().out)["features"] == {"ok": False}


def test_gpu_check_leaves_out_what_a_device_does_not_have() -> None:
    def parts(
        *, device: str = "cuda", no_timing: bool = False, no_features: bool = False
    ) -> set[str]:
        told = Namespace(device=device, no_timing=no_timing, no_features=no_features)
        return set(gpu_check.parts_on(told))

    assert parts() == set(gpu_check.PARTS)
    assert parts(no_timing=True) == set(gpu_check.CHECKS)
    assert parts(no_features=True) == set(gpu_check.PARTS) - {"features"}
    assert parts(device="cpu").isdisjoint(gpu_check.CUDA_PARTS)
