"""Benchmarks of kernels and formats run at their smallest sizes; how fast is not asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import (
    bench_calibrated_experts,
    bench_cpu_attention,
    bench_cpu_experts,
    bench_cpu_linear,
    bench_kv_dtype,
    bench_kv_eviction,
    bench_lora,
    bench_sampling,
    bench_states,
)
from support.cpu_kernels import multiplies_bfloat16, needs_cpu_library
from support.figures import is_figure
from support.recurrence_cases import gated_delta_rule, mamba, mamba2


def test_each_kv_format_is_compared_with_the_models_own(tiny_base: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--sequences", "2", "--length", "70")
    bench_kv_dtype.main(["--model", str(tiny_base), *sizes, "--json", str(report)])
    results = json.loads(report.read_text())["results"]
    assert [result["kv_dtype"] for result in results] == list(bench_kv_dtype.FORMATS)
    assert all(result["blocks_ratio"] > 1 for result in results)
    bounds = {"int8": 0.2, "fp8": 0.2, "int4": 0.5, "int2": 1.0}
    assert all(0 < result["logits_error"] < bounds[result["kv_dtype"]] for result in results)
    room = {result["kv_dtype"]: result["room"] for result in results}
    assert room["int4"] >= 3.5
    assert room["int2"] >= 6


def test_a_full_cache_answers_the_tasks_that_eviction_is_measured_by(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--length", "300", "--needles", "4", "--copies", "1", "--budgets", "64")
    bench_kv_eviction.main([*sizes, "--json", str(report)])
    results = json.loads(report.read_text())["results"]
    assert [(row["policy"], row["budget"]) for row in results] == [("snapkv", 64), ("h2o", 64)]
    assert all(row["full_right"] == row["full_copy_right"] == 1 for row in results)
    snapkv, h2o = (row["needle_right"] for row in results)
    assert snapkv > h2o
    assert all(row["copy_right"] < 0.5 for row in results)


def test_lora_is_timed_in_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_lora, "MAX_MS", 0.0)  # the fewest repeats
    report = tmp_path / "report.json"
    bench_lora.main(["--shape", "tiny", "--json", str(report)])
    timings = json.loads(report.read_text())["timings"]
    steps = {(timing["phase"], timing["popularity"]) for timing in timings}
    assert len(steps) == len(bench_lora.NUM_TOKENS) * len(bench_lora.POPULARITIES)
    assert all(is_figure(timing["milliseconds"]) for timing in timings)


def test_sampling_is_timed_without_a_parameter_and_with_it_in_one_row_and_in_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.set_num_threads", lambda num_threads: None)
    report = tmp_path / "sampling.json"
    sizes = ["--vocab-size", "2000", "--history", "9", "--rows", "2", "--repeats", "1"]
    bench_sampling.main([*sizes, "--json", str(report)])
    figures = json.loads(report.read_text())
    assert len(figures) == len(bench_sampling.PARAMETERS) * len(bench_sampling.DEVIATIONS)
    assert "penalties" in capsys.readouterr().out


def test_attention_on_the_cpu_is_timed_for_decoding_and_for_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cpu_attention, "DECODES", ((2, 40),))
    monkeypatch.setattr(bench_cpu_attention, "PROMPTS", ((20, 40),))
    report = tmp_path / "report.json"
    bench_cpu_attention.main(["--shape", "31m", "--repeats", "1", "--json", str(report)])
    rows = json.loads(report.read_text())
    assert [(row["sequences"], row["new tokens"]) for row in rows] == [(2, 1), (1, 20)]
    assert all(is_figure(row["ms"]) for row in rows)


@needs_cpu_library
def test_linear_layers_on_the_cpu_are_timed_in_every_form(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["--shape", "31m", "--rows", "1", "3", "--repeats", "1"]
    bench_cpu_linear.main([*sizes, "--json", str(report)])
    rows = json.loads(report.read_text())
    assert [row["rows"] for row in rows] == [1, 3]
    assert all(is_figure(row[name]) for row in rows for name in bench_cpu_linear.FORMS)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="the processor lacks AVX512_BF16")
def test_linear_layers_in_bf16_on_the_cpu_are_timed_in_both_forms(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["--shape", "31m", "--rows", "1", "--repeats", "1", "--dtype", "bfloat16"]
    bench_cpu_linear.main([*sizes, "--json", str(report)])
    (row,) = json.loads(report.read_text())
    assert all(is_figure(row[name]) for name in bench_cpu_linear.BFLOAT16_FORMS)


@needs_cpu_library
def test_experts_on_the_cpu_are_timed_in_every_form(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["--num-layers", "1", "--hidden-size", "64", "--intermediate-size", "32"]
    bench_cpu_experts.main([*sizes, "--tokens", "1", "3", "--repeats", "1", "--json", str(report)])
    rows = json.loads(report.read_text())
    assert [row["tokens"] for row in rows] == [1, 3]
    assert all(is_figure(row[name]) for row in rows for name in bench_cpu_experts.FORMS)


def test_recurrences_are_timed_beside_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    small = {"delta rule": gated_delta_rule, "mamba2": mamba2, "mamba": mamba}
    monkeypatch.setattr(bench_states, "LAYERS", small)
    sizes = ["--sequences", "2", "--rows", "1", "3", "--repeats", "1", "--num-layers", "1"]
    bench_states.main([*sizes, "--layers", *small, "--json", str(report)])
    rows = json.loads(report.read_text())
    assert [(row["layer"], row["rows"]) for row in rows] == [
        (layer, num_rows) for layer in small for num_rows in (1, 3)
    ]
    assert all(is_figure(row[form]) for row in rows for form in bench_states.FORMS)


def test_calibrated_experts_are_compared_with_the_nearest_codes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--experts", "2", "--steps", "2", "--samples", "2")
    bench_calibrated_experts.main([*sizes, "--json", str(report)])
    results = json.loads(report.read_text())
    assert [result["arm"] for result in results] == list(bench_calibrated_experts.ARMS)
    assert all(is_figure(result["divergence"]) for result in results)
