"""`make gpu-check` runs where there is a GPU; what it does is checked here on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
    run = run_gpu_check("--device", "cpu", "--requests", "24", "--no-timing")
    assert run.returncode == 0, run.stderr[-2000:]
    serving = json.loads(run.stdout)["serving"]
    assert serving["ok"]
    assert serving["adapter_evictions"] > 0
    assert serving["leaked_blocks"] == 0


def test_without_a_gpu_it_says_unmeasured() -> None:
    run = run_gpu_check()
    assert run.returncode == 2
    assert "unmeasured" in json.loads(run.stdout)["error"]
