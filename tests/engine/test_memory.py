from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InsufficientMemory
from loraplex.engine.kv_groups import one_group
from loraplex.engine.memory import MIB, available_bytes, plan_memory

SIZES: dict[str, Any] = {
    "available_bytes": 1000 * MIB,
    "weight_bytes": 100 * MIB,
    "activation_bytes": 100 * MIB,
    "groups": one_group(2, 2),
    "bytes_per_block": [MIB],
    "max_model_len": 1600,
    "is_host": False,
}
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".src")}


def test_what_is_free_goes_to_reserve_activations_adapters_and_kv() -> None:
    plan = plan_memory(EngineConfig("m"), **SIZES)
    assert plan.arena_bytes == 200 * MIB  # a quarter of 1000 - 100 reserve - 100 activations
    assert plan.num_kv_blocks == 600
    assert plan.max_model_len == 1600
    assert any("600 blocks" in line for line in plan.lines)


def test_on_the_host_the_host_cache_and_the_decode_windows_are_counted() -> None:
    config = EngineConfig("m", host_cache_bytes=200 * MIB)
    plan = plan_memory(config, **{**SIZES, "is_host": True})
    assert plan.arena_bytes == 75 * MIB  # half of a quarter of 800 - 200
    assert plan.num_kv_blocks == 450
    with pytest.raises(InsufficientMemory):
        plan_memory(EngineConfig("m", host_cache_bytes=900 * MIB), **{**SIZES, "is_host": True})


def test_kv_takes_no_more_than_the_batch_can_use() -> None:
    plan = plan_memory(EngineConfig("m", max_num_seqs=3), **SIZES)
    assert plan.num_kv_blocks == 3 * 100


def test_given_sizes_are_taken_as_they_are() -> None:
    config = EngineConfig("m", arena_bytes=7 * MIB, kv_cache_bytes=200 * MIB)
    plan = plan_memory(config, **SIZES)
    assert (plan.arena_bytes, plan.num_kv_blocks) == (7 * MIB, 200)


@pytest.mark.parametrize(
    "sizes",
    [
        {"kv_cache_bytes": 801 * MIB, "arena_bytes": 0},
        {"arena_bytes": 900 * MIB},
        {"memory_bytes": 100 * MIB},
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(sizes: dict[str, int]) -> None:
    with pytest.raises(InsufficientMemory, match="adapter arena"):
        plan_memory(EngineConfig("m", **sizes), **SIZES)  # type: ignore[arg-type]


def test_a_context_nobody_asked_for_shrinks_to_what_fits() -> None:
    plan = plan_memory(EngineConfig("m", kv_cache_bytes=50 * MIB), **SIZES)
    assert plan.max_model_len == 50 * 16
    with pytest.raises(InsufficientMemory, match="needs 100 KV blocks"):
        plan_memory(EngineConfig("m", kv_cache_bytes=50 * MIB, max_model_len=1600), **SIZES)


def test_the_peak_of_a_run_is_seen_though_it_is_freed_again() -> None:
    # In a process of its own: this one's allocator may hold pages of earlier tests.
    script = (
        "import torch; from loraplex.engine.memory import peak_bytes; "
        "run = lambda: torch.ones(64 << 20, dtype=torch.uint8).max(); "
        "print(peak_bytes(torch.device('cpu'), run))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, env=ENV, check=True)
    assert 56 * MIB < int(out.stdout) < 100 * MIB
    assert available_bytes(torch.device("cpu")) > 0
