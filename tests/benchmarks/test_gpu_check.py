"""`make gpu-check` needs a GPU; its code is checked here on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_bars import bars
from benchmarks.gpu_check import main
from benchmarks.idle_check import SAMPLING, check_waits
from benchmarks.speculation_check import LEAST_P_VALUE, least_p_value
from torch import Tensor

from benchmarks import (
    expert_check,
    fused_layers_check,
    lora_check,
    packed_experts_check,
    quantized_forms_check,
    rank_check,
    recurrence_check,
    states_check,
    trainer_check,
)
from loraplex.api.bench.models import BaseShape
from loraplex.engine.config import Acceptance
from loraplex.engine.execution.runner import StepOutput
from loraplex.engine.ranks.leader_runner import LeaderRunner
from loraplex.engine.request import Request
from loraplex.engine.speculation.acceptors import Accepted, make_acceptor
from loraplex.engine.tuning.messages import Trained
from loraplex.kernels.expert_packing import pack_experts
from loraplex.kernels.linear import DenseLinear
from loraplex.kernels.lora_vectors import apply_vectors
from loraplex.kernels.lora_weights import AdapterWeights
from loraplex.kernels.packed_experts import PackedExperts
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from support.plain_tiles import multiply_tiles, plain_expert_kernels
from support.quantized_weights import Case, make_weight
from support.recurrence_cases import gated_delta_rule, mamba, plain_advance


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run_gpu_check(*arguments: str) -> int:
    with patch.object(sys, "argv", ["gpu_check", *arguments]):
        return main()


def test_the_check_pages_adapters_and_finds_equal_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The features are proven on the CPU in a test of their own.
    assert run_gpu_check("--device", "cpu", "--requests", "24", "--no-timing", "--no-features") == 0
    result = json.loads(capsys.readouterr().out)
    serving = result["serving"]
    assert serving["ok"]
    assert serving["adapter_evictions"] > 0
    assert serving["leaked_blocks"] == 0
    assert result["speculation"]["ok"]
    assert result["quantization"]["ok"]
    for proposer in result["speculation"]["proposers"].values():
        assert proposer["different_beyond_near_ties"] == 0
        assert proposer["draft_tokens"] > 0


def test_a_base_with_experts_is_compared_with_its_own_adapters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_gpu_check("--device", "cpu", "--requests", "16", "--parts", "serving_experts") == 0
    assert json.loads(capsys.readouterr().out)["serving_experts"]["adapter_evictions"] > 0


def test_fused_layers_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BaseShape(hidden_size=96, intermediate_size=100, num_heads=6, num_kv_heads=2)
    monkeypatch.setattr(fused_layers_check, "SHAPES", (shape,))
    found = fused_layers_check.check_fused_layers("cpu")
    assert found == {"ok": True, "cases": 7 * 3 * 3, "differing": []}
    monkeypatch.setattr(fused_layers_check, "plain_rotary", lambda q, k, *_: (q, k))
    found = fused_layers_check.check_fused_layers("cpu")
    assert not found["ok"]
    assert len(found["differing"]) == 3 * 3
    assert all(name.startswith("rotary") for name in found["differing"])


def test_experts_that_differ_or_change_other_tokens_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = expert_check.ExpertsShape(3, 2, 16, 24, has_bias=True)
    monkeypatch.setattr(expert_check, "SHAPES", (shape,))
    monkeypatch.setattr(expert_check, "DTYPES", (torch.float32,))
    kernels = plain_expert_kernels()
    shorter = SimpleNamespace(
        multiply_tiles=lambda x, *others, **options: (
            multiply_tiles(x, *others, **options) * (1 + 1e-3 * len(x))
        )
    )
    found = expert_check.check_experts("cpu", kernels._replace(linear=shorter))
    assert not found["ok"]
    assert len(found["differing"]) == len(expert_check.NUM_TOKENS)
    alone, *others = found["tokens_changed_by_others"].values()
    assert not alone
    assert all(others)
    without_lora = SimpleNamespace(add_tiles=lambda *_, **__: None)
    found = expert_check.check_experts("cpu", kernels._replace(lora=without_lora))
    assert found["differing"]


def test_quantized_forms_that_differ_or_change_other_rows_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(CodeType.INT4, 32, torch.float16, torch.int8, True, shape=(9, 77))
    monkeypatch.setattr(quantized_forms_check, "CHECKED", (case,))

    def pack(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> DenseLinear:
        return DenseLinear(weight.dequantize(dtype), bias)

    found = quantized_forms_check.check_forms("cpu", pack)
    assert found == {"ok": True, "cases": 9, "differing": [], "rows_changed_by_others": []}
    found = quantized_forms_check.check_forms(
        "cpu", lambda weight, *others: pack(replace(weight, zero=None), *others)
    )
    assert not found["ok"]
    assert len(found["differing"]) == 9

    def pack_centred(*arguments: Any) -> DenseLinear:
        linear = pack(*arguments)
        linear.forward = lambda x: F.linear(x - x.mean(dim=0), linear.weight)  # type: ignore[method-assign]
        return linear

    found = quantized_forms_check.check_forms("cpu", pack_centred)
    assert len(found["rows_changed_by_others"]) == 6, "those of several rows"


def test_a_group_of_one_rank_answers_as_no_group(tmp_path: Path) -> None:
    checked = rank_check.check_ranks(tmp_path, device="cpu")
    assert checked["ok"]
    assert checked.keys() == {"ok", "one_rank"}
    assert checked["one_rank"]["requests"] == rank_check.NUM_REQUESTS


def test_ranks_whose_logits_differ_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(_runner: LeaderRunner, output: StepOutput) -> StepOutput:
        return output._replace(logits=output.logits * 1.001)

    monkeypatch.setattr(LeaderRunner, "_checked", scaled)
    checked = rank_check.check_ranks(tmp_path, device="cpu")
    assert not checked["ok"]
    assert checked["one_rank"]["max_error"] > rank_check.TOLERANCE


def test_states_that_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = states_check.check_states(tmp_path, device="cpu", cases=["lfm2"])
    assert found["ok"]
    assert found["errors"]["lfm2"] < 1e-5
    assert not found["refused"]
    monkeypatch.setattr(states_check, "TOLERANCE", 0.0)
    assert not states_check.check_states(tmp_path, device="cpu", cases=["mamba2"])["ok"]


def test_recurrences_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"delta rule": gated_delta_rule, "mamba": mamba}
    monkeypatch.setattr(recurrence_check, "LAYERS", small)
    found = recurrence_check.check_recurrences("cpu")
    assert found["ok"]
    assert len(found["errors"]) == 4

    def forgetful(change: Any, states: Tensor, *others: Any) -> Tensor:
        return plain_advance(change, torch.zeros_like(states), *others)

    monkeypatch.setattr(recurrence_check, "plain_advance", forgetful)
    assert not recurrence_check.check_recurrences("cpu")["ok"]


def test_packed_experts_that_differ_or_change_other_tokens_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(CodeType.TABLE4, 32, shape=(9, 64))
    monkeypatch.setattr(packed_experts_check, "CHECKED", (case,))
    found = packed_experts_check.check_packed_experts("cpu")
    ok = {"ok": True, "differing": [], "tokens_changed_by_others": [], "served_dense": []}
    assert found == ok
    other = make_weight(case, seed=9)

    def pack_last_otherwise(
        matrices: Sequence[QuantizedWeight], num_experts: int, **how: Any
    ) -> PackedExperts | None:
        return pack_experts([*matrices[:-1], other], num_experts, **how)

    monkeypatch.setattr(packed_experts_check, "pack_experts", pack_last_otherwise)
    found = packed_experts_check.check_packed_experts("cpu")
    assert not found["ok"]
    assert 6 <= len(found["differing"]) <= 12, "those of several tokens"

    def pack_mean(matrices: Sequence[QuantizedWeight], *_: Any, **__: Any) -> Any:
        values = torch.stack([matrix.dequantize() for matrix in matrices])
        return lambda x, pairs: torch.einsum("pi,poi->po", x - x.mean(), values[pairs.experts])

    monkeypatch.setattr(packed_experts_check, "pack_experts", pack_mean)
    monkeypatch.setattr(packed_experts_check, "DTYPES", (torch.float32,))
    found = packed_experts_check.check_packed_experts("cpu")
    assert len(found["tokens_changed_by_others"]) == 3, "those of several tokens"
    monkeypatch.setattr(packed_experts_check, "pack_experts", lambda *_, **__: None)
    found = packed_experts_check.check_packed_experts("cpu")
    assert found["served_dense"] == [str(case)]


def test_packed_experts_are_timed_beside_a_copy_of_the_chosen_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another clock: graphs are captured on CUDA only."""

    def run_once(run: Callable[[], object]) -> float:
        run()
        return 2.0

    shape = expert_check.ExpertsShape(4, 2, 64, 16)
    monkeypatch.setattr(packed_experts_check, "SHAPES", (shape,))
    monkeypatch.setattr(packed_experts_check, "TIMED_TOKENS", (1, 8))
    monkeypatch.setattr(packed_experts_check, "graph_seconds", run_once)
    monkeypatch.setattr(packed_experts_check, "copy_bandwidth", lambda _device: 1e6)
    rows = packed_experts_check.time_packed_experts("cpu")
    assert [(row["form"], row["tokens"]) for row in rows] == [
        (form, num_tokens) for form in packed_experts_check.TIMED for num_tokens in (1, 8)
    ]
    one, all_four = (row["over floor"] for row in rows[:2])
    assert one == pytest.approx(2 * all_four, rel=1e-2), "one token chooses half of the experts"
    assert quantized_forms_check.copy_bandwidth("cpu") > 0


def test_vectors_that_differ_or_change_other_rows_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lora_check, "PROJECTIONS", ((16, (40, 17)),))
    found = lora_check.check_vectors("cpu")
    assert found["ok"]
    assert len(found["rows_changed_by_others"]) == 3 * 4

    def without_bias(
        y: Tensor, weights: AdapterWeights, token_rows: Tensor, _bias: object, **shape: Any
    ) -> None:
        apply_vectors(y, weights, token_rows, None, **shape)

    monkeypatch.setattr(lora_check, "apply_vectors", without_bias)
    found = lora_check.check_vectors("cpu")
    assert not found["ok"]
    assert len(found["differing"]) == 3 * 3, "those with a bias of the base"

    def by_number_of_rows(y: Tensor, *_: Any, **__: Any) -> None:
        y += len(y)

    monkeypatch.setattr(lora_check, "apply_vectors", by_number_of_rows)
    found = lora_check.check_vectors("cpu")
    assert not found["ok"]
    assert all(found["rows_changed_by_others"].values())


def test_without_a_gpu_it_says_unmeasured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gpu_check() == 2
    assert "unmeasured" in json.loads(capsys.readouterr().out)["error"]


class Credulous:
    """Accepts every draft token."""

    def accept(self, requests: Sequence[Request], logits: Tensor) -> list[Accepted]:
        return [Accepted([0, 1], [*request.draft.token_ids, 0]) for request in requests]


def test_a_rule_of_acceptance_that_is_not_the_models_is_caught() -> None:
    assert least_p_value(make_acceptor(Acceptance.REJECTION), device="cpu") > LEAST_P_VALUE
    assert least_p_value(Credulous(), device="cpu") < LEAST_P_VALUE


def test_steps_that_nobody_may_wait_for_decode_with_every_kind_of_sampling(tmp_path: Path) -> None:
    assert check_waits(tmp_path, "cpu") == {"steps_without_waits": 20}
    assert len(SAMPLING) == 6


def test_each_figure_with_a_bar_is_listed_beside_it() -> None:
    step = {"mode": "graphs", "batch": 32, "over bytes": 1.05, "of bandwidth": 0.7}
    chunk = {"prompts": 1, "tokens each": 1024, "ratio": 1.2, "over floor": 1.25}
    found = bars(
        {
            "mixed_step": {
                "rows": [
                    {**step, "adapters": "base"},
                    {**step, "adapters": "one adapter"},
                    {**step, "adapters": "one with lm_head"},
                    {**step, "adapters": "base", "mode": "eager"},
                ],
                "dora_over_all_distinct": {"graphs": 1.08},
            },
            "mixed_step_int8": {"rows": [{**step, "adapters": "base"}]},
            "attention_times": {
                "prefill": [
                    {"new_tokens": 512, "microseconds": 20.0, "dense_microseconds": 16.0},
                    {"new_tokens": 256, "microseconds": 20.0, "dense_microseconds": None},
                ]
            },
            "idle": {
                "rows": [
                    {"async": True, "sequences": 32, "idle": 0.04},
                    {"async": False, "sequences": 32, "idle": 0.3},
                ]
            },
            "rank_times": {"rows": [{"batch": 8, "times_as_fast": 1.7}]},
            "prompts": {
                "rows": [
                    {**chunk, "adapters": "base"},
                    {**chunk, "adapters": "one adapter"},
                    {**chunk, "adapters": "base", "prompts": 8},
                ]
            },
        }
    )
    assert [(row["value"], row["bar"], row["holds"]) for row in found] == [
        (0.7, ">= 0.75", False),
        (0.7, ">= 0.6", True),
        (1.05, "<= 1.08", True),
        (1.08, "<= 1.1", True),
        (1.25, "<= 1.3", True),
        (1.2, "<= 1.1", False),
        (1.25, "<= 1.15", False),
        (0.04, "<= 0.03", False),
        (1.7, ">= 1.6", True),
    ]
    assert bars({"serving": {"ok": True}}) == []


def test_a_trainers_losses_are_compared_and_its_limit_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_check, "QUANTIZATIONS", ("int8",))
    found = trainer_check.check_trainer(tmp_path, "cpu")
    assert found == {"ok": True, "differences": {"int8": 0.0}, "above_the_limit": ["out_of_memory"]}


def test_losses_that_differ_or_are_missing_fail_the_check() -> None:
    steps = [Trained(number, loss, 1e-3, 8) for number, loss in enumerate((2.0, 1.0))]
    other = [steps[0], Trained(1, 1.25, 1e-3, 8)]
    assert trainer_check._difference(steps, other) == 0.25
    assert trainer_check._difference(steps, steps[:1]) == float("inf")
    assert trainer_check._difference([], []) == float("inf")
