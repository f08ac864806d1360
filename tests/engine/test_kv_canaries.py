"""Canaries whose marker is in the KV cache, with prefixes on the device, the host and the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.execution import profiling
from loraplex.engine.kv.group_blocks import GroupBlocks
from loraplex.engine.kv.host_slots import HostSlots
from loraplex.engine.kv.prefix_cache import Prefix, PrefixHasher
from loraplex.engine.memory import plan
from loraplex.engine.scheduling.step_costs import StepCosts
from support.canaries import MARKERS, run_canaries
from support.kv_canaries import BLOCK_BYTES, IN_KV, code


@pytest.fixture(autouse=True)
def _free_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pay, whatever was measured."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)


def test_every_answer_comes_from_the_requests_own_values() -> None:
    found = run_canaries(80, seed=0, canaries=IN_KV)
    assert found["foreign"] == 0
    assert found["tokens_from_host"] > 500


def test_every_answer_comes_from_its_own_values_with_prefixes_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "read_seconds", lambda *_: 0.0)
    config: dict[str, object] = {
        **IN_KV.config,
        "swap_bytes": 24 * BLOCK_BYTES,
        "prefix_disk_bytes": 1 << 22,
        "prefix_disk_dir": str(tmp_path / "prefixes"),
    }
    found = run_canaries(80, seed=0, canaries=IN_KV._replace(config=config))
    assert found["foreign"] == 0
    assert found["blocks_from_disk"] > 10


@pytest.mark.slow
def test_every_answer_comes_from_its_own_values_while_blocks_and_adapters_change_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "divides_memory", lambda _memory: True)
    # The process's own high-water mark differs by megabytes from run to run.
    monkeypatch.setattr(profiling, "peak_bytes", lambda *_: 1 << 20)
    moved: list[int] = []

    def withdraw_last(self: GroupBlocks, *args: Any) -> None:
        right(self, *args)
        moved.append(self.num_moved)

    right = GroupBlocks.withdraw_last
    monkeypatch.setattr(GroupBlocks, "withdraw_last", withdraw_last)
    config: dict[str, object] = {
        "swap_bytes": 96 * BLOCK_BYTES,
        "arena_bytes": None,
        "kv_cache_bytes": None,
        "memory_bytes": 5 << 20,
    }
    assert run_canaries(120, seed=0, canaries=IN_KV._replace(config=config))["foreign"] == 0
    assert moved[-1] > 10


def test_no_code_is_near_another() -> None:
    codes = {marker: code(marker) for marker in MARKERS}
    for marker, own in codes.items():
        products = {other: float(own @ codes[other]) for other in codes}
        assert products.pop(marker) == 16
        assert max(products.values()) <= 8


@pytest.mark.slow
def test_a_prefix_of_another_adapter_on_the_host_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(self: HostSlots, prefix: Prefix) -> int | None:
        for slot, stored in self.prefixes._prefixes.items():
            is_as_deep = bool(stored.parent) == bool(prefix.parent)
            if is_as_deep and stored.token_ids == prefix.token_ids:
                return slot
        return None

    monkeypatch.setattr(HostSlots, "find", find)
    assert run_canaries(60, seed=0, canaries=IN_KV)["foreign"] > 0


@pytest.mark.slow
def test_a_key_without_tenant_and_adapter_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PrefixHasher.prefix

    def prefix(self: PrefixHasher, chain: Any, index: int, namespace: Any, tokens: Any) -> Prefix:
        shared = replace(namespace, tenant_id="", adapter=None)
        return right(self, chain, index, shared, tokens)

    monkeypatch.setattr(PrefixHasher, "prefix", prefix)
    assert run_canaries(60, seed=0, canaries=IN_KV)["foreign"] > 0
