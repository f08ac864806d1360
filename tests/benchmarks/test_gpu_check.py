"""`make gpu-check` needs a GPU; its code is checked here on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.speculation_check import LEAST_P_VALUE, least_p_value
from torch import Tensor

from loraplex.engine.config import Acceptance
from loraplex.engine.request import Request
from loraplex.engine.speculation.acceptors import Accepted, make_acceptor

ROOT = Path(__file__).parents[2]


def run_gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ".src:tests", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_check_pages_adapters_and_finds_equal_tokens() -> None:
    # The features are proven on the CPU in a test of their own.
    run = run_gpu_check("--device", "cpu", "--requests", "24", "--no-timing", "--no-features")
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout)
    serving = result["serving"]
    assert serving["ok"]
    assert serving["adapter_evictions"] > 0
    assert serving["leaked_blocks"] == 0
    assert result["speculation"]["ok"]
    assert result["quantization"]["ok"]
    for proposer in result["speculation"]["proposers"].values():
        assert proposer["different_beyond_near_ties"] == 0
        assert proposer["draft_tokens"] > 0


def test_without_a_gpu_it_says_unmeasured() -> None:
    run = run_gpu_check()
    assert run.returncode == 2
    assert "unmeasured" in json.loads(run.stdout)["error"]


class Credulous:
    """Believes every guess."""

    def accept(self, requests: Sequence[Request], logits: Tensor) -> list[Accepted]:
        return [Accepted([0, 1], [*request.draft.token_ids, 0]) for request in requests]


def test_a_rule_of_acceptance_that_is_not_the_models_is_caught() -> None:
    assert least_p_value(make_acceptor(Acceptance.REJECTION), device="cpu") > LEAST_P_VALUE
    assert least_p_value(Credulous(), device="cpu") < LEAST_P_VALUE
