from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.config import MAX_READ_ROWS, EngineConfig
from loraplex.engine.errors import InsufficientMemory
from loraplex.engine.execution import profiling
from loraplex.engine.kv.groups import one_group
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.memory.demands import BaseDemand, ProposerDemand
from loraplex.engine.memory.device_memory import DeviceMemory, available_bytes
from loraplex.engine.memory.divided_memory import divide_memory
from loraplex.engine.memory.kv_budget import MIB, KvDemand
from loraplex.engine.memory.kv_demands import num_steps_in_flight
from loraplex.engine.memory.plan import MemoryPlan, plan_memory
from loraplex.engine.model.forward import run_model
from loraplex.kernels.attention_window import AttentionWindow
from support.engine import LocalEngine

DEVICE = DeviceMemory(1000 * MIB, is_host=False)
HOST = DeviceMemory(1000 * MIB, is_host=True)
WHOLE = one_group(2, 2)
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".src")}


def plan_for(
    config: EngineConfig,
    memory: DeviceMemory = DEVICE,
    *groups: KvGroup,
    bytes_per_block: Sequence[int] | None = None,
    proposers: ProposerDemand = ProposerDemand(),
    weight_format: str = "none",
) -> MemoryPlan:
    """For a base with 100 MiB of weights and of activations, up to 1600 tokens long."""
    groups = groups or WHOLE
    kv = tuple(
        KvDemand(config, group, size, max_model_len=1600)
        for group, size in zip(groups, bytes_per_block or [MIB] * len(groups), strict=True)
    )
    base = BaseDemand(100 * MIB, 100 * MIB, kv, weight_format=weight_format)
    return plan_memory(config, memory, base, proposers)


def test_what_trainers_take_is_left_free_beside_the_engines_limit() -> None:
    kept = EngineConfig("m", trainer_bytes=400 * MIB)
    plan = plan_for(kept)
    assert plan.arena_bytes == 110 * MIB  # a quarter of 600 - 60 reserve - 100 activations
    assert "left for trainers 400.0 MiB" in plan.lines
    roomy = replace(kept, memory_bytes=600 * MIB)
    assert plan_for(roomy).num_kv_blocks == plan_for(replace(roomy, trainer_bytes=0)).num_kv_blocks
    with pytest.raises(InsufficientMemory, match=r"left for trainers 950\.0 MiB.*--tuning-bytes"):
        plan_for(replace(kept, trainer_bytes=950 * MIB))


def test_what_is_free_goes_to_reserve_activations_adapters_and_kv() -> None:
    plan = plan_for(EngineConfig("m"))
    assert plan.arena_bytes == 200 * MIB  # a quarter of 1000 - 100 reserve - 100 activations
    assert plan.num_kv_blocks == 600
    assert plan.max_model_len == 1600
    assert any("600 blocks" in line for line in plan.lines)


def test_the_format_of_the_weights_is_named_beside_their_bytes() -> None:
    quantized = plan_for(EngineConfig("m"), weight_format="gptq-int4")
    assert quantized.lines[0].endswith("weights 100.0 MiB (gptq-int4)")
    assert plan_for(EngineConfig("m")).lines[0].endswith("weights 100.0 MiB")


def test_on_the_host_the_host_cache_is_counted() -> None:
    plan = plan_for(EngineConfig("m", host_cache_bytes=200 * MIB), HOST)
    assert plan.arena_bytes == 150 * MIB  # a quarter of 800 - 200
    assert plan.num_kv_blocks == (600 - 150) // 2
    with pytest.raises(InsufficientMemory):
        plan_for(EngineConfig("m", host_cache_bytes=900 * MIB), HOST)


def test_on_the_host_the_default_leaves_memory_to_other_programs_and_says_so() -> None:
    plan = plan_for(EngineConfig("m"), DeviceMemory(64_000 * MIB, is_host=True))
    assert plan.arena_bytes == 4096 * MIB
    assert plan.num_kv_blocks == 64 * 100  # a full batch, and no more
    assert "--kv-cache-gib, --arena-gib or --host-cache-gib" in plan.lines[-1]
    large = plan_for(EngineConfig("m", max_num_seqs=640), DeviceMemory(64_000 * MIB, is_host=True))
    assert large.num_kv_blocks == (57_600 - 100 - 1024 - 4096) // 2
    assert not any("--host-cache-gib" in line for line in plan_for(EngineConfig("m")).lines)


def test_on_the_host_given_sizes_are_taken_as_they_are() -> None:
    host = DeviceMemory(10_000 * MIB, is_host=True)
    config = EngineConfig("m", arena_bytes=2000 * MIB, kv_cache_bytes=5000 * MIB)
    plan = plan_for(config, host)
    assert (plan.arena_bytes, plan.num_kv_blocks) == (2000 * MIB, 5000)


def test_on_the_host_a_length_that_was_asked_for_gets_more_than_its_part() -> None:
    config = EngineConfig("m", host_cache_bytes=600 * MIB, arena_bytes=0, max_model_len=1600)
    assert plan_for(config, HOST).num_kv_blocks == 100  # half of 200
    config = EngineConfig("m", host_cache_bytes=650 * MIB, arena_bytes=0, max_model_len=1600)
    assert plan_for(config, HOST).num_kv_blocks == 100  # of 150
    config = EngineConfig("m", host_cache_bytes=650 * MIB, arena_bytes=0)
    assert plan_for(config, HOST).max_model_len == 75 * 16


def test_kv_takes_no_more_than_the_batch_can_use() -> None:
    plan = plan_for(EngineConfig("m", max_num_seqs=3))
    assert plan.num_kv_blocks == 3 * 100


def test_given_sizes_are_taken_as_they_are() -> None:
    config = EngineConfig("m", arena_bytes=7 * MIB, kv_cache_bytes=200 * MIB)
    plan = plan_for(config)
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
        plan_for(EngineConfig("m", **sizes))  # type: ignore[arg-type]


def test_a_context_nobody_asked_for_shrinks_to_what_fits() -> None:
    plan = plan_for(EngineConfig("m", kv_cache_bytes=50 * MIB))
    assert plan.max_model_len == 50 * 16
    with pytest.raises(InsufficientMemory, match="needs 100 KV blocks"):
        plan_for(EngineConfig("m", kv_cache_bytes=50 * MIB, max_model_len=1600))


def test_a_draft_model_gets_as_many_tokens_of_kv_as_the_base() -> None:
    draft = ProposerDemand(model_bytes=30 * MIB, kv_block_bytes=MIB // 2)
    plan = plan_for(EngineConfig("m"), proposers=draft)
    assert plan.arena_bytes == 200 * MIB
    assert plan.num_kv_blocks == plan.num_draft_blocks == 400  # of 1.5 MiB together
    assert any("draft model 30.0 MiB, its KV cache 400 blocks" in line for line in plan.lines)
    assert plan_for(EngineConfig("m")).num_draft_blocks == 0


def test_a_draft_model_takes_what_is_given_besides_the_bases_own_kv() -> None:
    draft = ProposerDemand(model_bytes=30 * MIB, kv_block_bytes=MIB // 2)
    config = EngineConfig("m", kv_cache_bytes=200 * MIB, arena_bytes=0)
    plan = plan_for(config, proposers=draft)
    assert (plan.num_kv_blocks, plan.num_draft_blocks) == (200, 200)
    config = EngineConfig("m", kv_cache_bytes=540 * MIB, arena_bytes=0)  # 270 more, of 800
    with pytest.raises(InsufficientMemory, match="draft model 30"):
        plan_for(config, proposers=draft)
    config = EngineConfig("m", memory_bytes=630 * MIB, arena_bytes=0)
    plan = plan_for(config, proposers=draft)
    # Of 630 - 100 - 30 for weights a tenth is the reserve, 100 are for activations.
    assert plan.num_draft_blocks == 350 * 2 // 3


def test_medusa_heads_are_part_of_what_the_engine_may_use() -> None:
    config = EngineConfig("m", memory_bytes=630 * MIB, arena_bytes=0)
    plan = plan_for(config, proposers=ProposerDemand(head_bytes=30 * MIB))
    assert plan.num_kv_blocks == 350  # of 630 - 100 - 30, less a tenth and 100 for activations
    assert "Medusa heads 30.0 MiB" in plan.lines


def test_the_profile_looks_at_as_many_rows_as_verification_does(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []

    def noting(*args: Any) -> torch.Tensor:
        num_rows.append(len(args[-1]))
        return run_model(*args)

    monkeypatch.setattr(profiling, "run_model", noting)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_draft_tokens": 6}
    for speculation in ((), ("ngram",)):
        LocalEngine(tiny_base, tmp_path, speculation=speculation, **sizes).close()
    assert num_rows == [4 + MAX_READ_ROWS, 4 * 7 + MAX_READ_ROWS]
    assert (
        EngineConfig("m", speculation=("ngram",), max_num_batched_tokens=100).max_kept_rows == 100
    )


WINDOWED = KvGroup((2, 3), window=AttentionWindow(160), sinks=0, num_blocks=2)
LIMITED = KvGroup((0, 1), window=AttentionWindow(160), sinks=4, num_blocks=2)


def test_no_group_of_layers_runs_out_long_before_the_others() -> None:
    """600 MiB for 10 sequences that may be 1600 tokens long, of which two layers see 160."""
    config = EngineConfig("m", max_num_seqs=10, max_num_batched_tokens=64)
    plan = plan_for(config, DEVICE, *WHOLE, WINDOWED)
    whole, windowed = plan.kv_groups
    # (160 + 16 - 2) // 16 + 2 = 12 blocks each wherever the window lies, and a step of prefill.
    assert windowed.num_usable == 10 * 12 + 64 // 16
    assert whole.num_usable == 600 - windowed.num_usable
    assert plan.num_kv_blocks == 600
    assert plan.max_model_len == 1600
    assert any("2 layers that see 160 tokens: 10 sequences" in line for line in plan.lines)


def test_short_sequences_in_little_memory_need_as_many_blocks_in_every_group() -> None:
    config = EngineConfig("m", max_num_seqs=10, kv_cache_bytes=100 * MIB)
    whole, windowed = plan_for(config, DEVICE, *WHOLE, WINDOWED).kv_groups
    assert (whole.num_usable, windowed.num_usable) == (50, 50)


def test_layers_with_windows_alone_serve_sequences_longer_than_what_they_hold() -> None:
    plan = plan_for(EngineConfig("m", kv_cache_bytes=13 * MIB), DEVICE, LIMITED)
    assert plan.num_kv_blocks == 13
    assert plan.max_model_len == 1600 > 13 * 16
    assert any("160 tokens and 4 first ones: 1 sequences" in line for line in plan.lines)
    with pytest.raises(InsufficientMemory, match="needs 13 KV blocks"):
        plan_for(EngineConfig("m", kv_cache_bytes=12 * MIB), DEVICE, LIMITED)


def test_host_memory_of_adapters_and_kv_blocks_has_a_border_with_floors() -> None:
    plan = plan_for(EngineConfig("m", host_bytes=512 * MIB), DEVICE)
    host, shared = plan.host, plan.host.shared
    assert shared is not None
    bounds = shared.bounds
    assert bounds.total == 512 * MIB
    assert host.adapter_bytes == 256 * MIB
    assert bounds.least_adapters == bounds.least_kv == 32 * MIB
    assert host.num_slots == (480 * MIB // plan.kv_block_bytes[0],)
    assert any("512.0 MiB: adapters 32.0 to 480.0 MiB" in line for line in plan.lines)


def test_slots_of_windows_are_beside_the_memory_that_moves() -> None:
    config = EngineConfig("m", max_num_seqs=10, max_num_batched_tokens=64, host_bytes=600 * MIB)
    plan = plan_for(config, DEVICE, *WHOLE, WINDOWED)
    shared = plan.host.shared
    assert shared is not None
    windowed = plan.host.num_slots[1] * plan.kv_block_bytes[1]
    assert 0 < windowed < 300 * MIB
    assert 600 * MIB - windowed - MIB < shared.bounds.total <= 600 * MIB - windowed
    assert shared.group == 0


def test_host_memory_is_divided_once_where_no_layer_sees_all() -> None:
    plan = plan_for(EngineConfig("m", host_bytes=200 * MIB), DEVICE, WINDOWED)
    assert plan.host.shared is None
    assert plan.host.adapter_bytes == plan.host.kv_bytes == 100 * MIB
    assert plan.host.num_slots != ()


def test_on_the_host_all_of_its_memory_is_counted() -> None:
    plan = plan_for(EngineConfig("m", host_bytes=300 * MIB), HOST)
    parts = plan_for(EngineConfig("m", host_cache_bytes=200 * MIB, swap_bytes=100 * MIB), HOST)
    assert plan.arena_bytes == parts.arena_bytes
    assert plan.num_kv_blocks == parts.num_kv_blocks


def test_swap_space_has_slots_in_the_proportion_of_the_blocks() -> None:
    config = EngineConfig("m", max_num_seqs=10, max_num_batched_tokens=64, swap_bytes=300 * MIB)
    plan = plan_for(config, DEVICE, *WHOLE, WINDOWED)
    assert plan.host.num_slots == tuple(g.num_usable // 2 for g in plan.kv_groups)
    assert any("300.0 MiB" in line for line in plan.lines)
    assert plan_for(EngineConfig("m"), DEVICE, WINDOWED).host.num_slots == ()
    on_host = plan_for(config, DeviceMemory(3000 * MIB, is_host=True), *WHOLE, WINDOWED)
    assert on_host.arena_bytes == (2700 - 100 - 300 - 1024) * MIB // 4


@given(
    kv_mib=st.integers(0, 4000),
    max_num_seqs=st.integers(1, 64),
    window=st.integers(1, 3000),
    sizes=st.tuples(st.integers(1, 3 * MIB), st.integers(1, 3 * MIB)),
    has_whole=st.booleans(),
)
def test_pools_never_exceed_what_is_given_and_hold_what_one_sequence_needs(
    kv_mib: int, max_num_seqs: int, window: int, sizes: tuple[int, int], has_whole: bool
) -> None:
    config = EngineConfig(
        "m",
        kv_cache_bytes=kv_mib * MIB,
        arena_bytes=0,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=65,
        max_model_len=1600,
    )
    first = WHOLE[0] if has_whole else LIMITED
    windowed = KvGroup((2, 3), window=AttentionWindow(window), sinks=0, num_blocks=2)
    needed = [group.peak_blocks(1600, 16, 16) for group in (first, windowed)]
    try:
        memory = DeviceMemory(10_000 * MIB, is_host=False)
        plan = plan_for(config, memory, first, windowed, bytes_per_block=sizes)
    except InsufficientMemory:
        assert kv_mib * MIB < sum(s * n for s, n in zip(sizes, needed, strict=True))
        return
    counts = [group.num_usable for group in plan.kv_groups]
    assert sum(size * count for size, count in zip(sizes, counts, strict=True)) <= kv_mib * MIB
    assert all(count >= least for count, least in zip(counts, needed, strict=True))


def test_the_peak_of_a_run_is_seen_though_it_is_freed_again() -> None:
    # In a process of its own: this one's allocator may hold pages of earlier tests.
    script = (
        "import torch; from loraplex.engine.memory.device_memory import peak_bytes; "
        "run = lambda: torch.ones(64 << 20, dtype=torch.uint8).max(); "
        "print(peak_bytes(torch.device('cpu'), run))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, env=ENV, check=True)
    assert 56 * MIB < int(out.stdout) < 100 * MIB
    assert available_bytes(torch.device("cpu")) > 0


def test_what_pytorch_keeps_of_freed_device_memory_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {"device": 3 * MIB, "kept": 5 * MIB}

    def give_back() -> None:
        free["device"] += free["kept"]
        free["kept"] = 0

    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free["device"], 80 * MIB))
    assert available_bytes(torch.device("cuda")) == 8 * MIB


@pytest.mark.parametrize("memory", [HOST, DeviceMemory(1000 * MIB, is_host=False)])
def test_a_refusal_says_how_much_memory_is_enough(memory: DeviceMemory) -> None:
    config = EngineConfig("m", memory_bytes=150 * MIB, host_cache_bytes=100 * MIB)
    with pytest.raises(InsufficientMemory, match=r"has 150\.0 MiB") as refusal:
        plan_for(config, memory)
    needed = re.search(r"needs at least ([0-9.]+) MiB", str(refusal.value))
    assert needed is not None
    enough = float(needed[1]) + 0.1
    assert plan_for(replace(config, memory_bytes=round(enough * MIB)), memory).num_kv_blocks >= 1
    with pytest.raises(InsufficientMemory):
        plan_for(replace(config, memory_bytes=round((enough - 4) * MIB)), memory)


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", {}, 2),
        ("cuda", {"async_scheduling": False}, 1),
        ("cpu", {}, 1),
        ("cpu", {"async_scheduling": True}, 2),
        ("cpu", {"pipeline_parallel_size": 3}, 3),
    ],
    ids=str,
)
def test_room_is_planned_for_the_steps_in_flight_that_a_device_has_unless_told(
    device: str, settings: dict[str, Any], expected: int
) -> None:
    config = EngineConfig("base", **settings)
    assert num_steps_in_flight(config, device) == expected


def test_on_the_host_the_border_between_arena_and_kv_may_move() -> None:
    plan = plan_for(EngineConfig("m", host_cache_bytes=200 * MIB), HOST)
    (group,), border = plan.kv_groups, plan.border
    assert border is not None
    assert border.total == plan.arena_bytes + group.num_usable * MIB
    assert border.least_adapters == border.total // 16 // 256 * 256
    # The cache keeps a sequence of the whole length, and grows to all but the arena's floor.
    assert (group.num_usable - group.num_less) * 16 == plan.max_model_len == 1600
    assert border.most_adapters == border.total - 100 * MIB
    assert group.num_usable + group.num_more == (border.total - border.least_adapters) // MIB
    assert any("border" in line for line in plan.lines)


def test_the_kv_cache_grows_to_no_more_than_two_full_batches() -> None:
    config = EngineConfig("m", host_cache_bytes=200 * MIB, max_num_seqs=1)
    plan = plan_for(config, HOST)
    (group,) = plan.kv_groups
    assert group.num_usable + group.num_more == 2 * 100


@pytest.mark.parametrize(
    "sizes", [{"arena_bytes": 100 * MIB}, {"kv_cache_bytes": 300 * MIB}], ids=["arena", "kv"]
)
def test_an_operator_who_sets_a_side_fixes_the_border(sizes: dict[str, Any]) -> None:
    plan = plan_for(EngineConfig("m", host_cache_bytes=200 * MIB, **sizes), HOST)
    assert plan.border is None
    assert not any(group.may_move for group in plan.kv_groups)


def test_on_a_device_only_the_last_blocks_come_and_go() -> None:
    plan = plan_for(EngineConfig("m"))
    (group,), border = plan.kv_groups, plan.border
    assert border is not None
    assert group.gives_end
    assert border.total == plan.arena_bytes + group.num_usable * MIB
    assert group.num_usable + group.num_more == (border.total - border.least_adapters) // MIB
    assert any("border" in line for line in plan.lines)
    (of_host,) = plan_for(EngineConfig("m", host_cache_bytes=MIB), HOST).kv_groups
    assert not of_host.gives_end


def test_on_a_device_both_sides_fit_into_one_memory_wherever_the_border_is() -> None:
    plan = plan_for(EngineConfig("m"))
    (group,), border = plan.kv_groups, plan.border
    assert border is not None
    blocks, arena = divide_memory(border, MIB, has_spare_block=True, device=torch.device("meta"))
    most = group.num_usable + group.num_more
    assert arena.numel() == border.most_adapters
    start = arena.storage_offset()
    assert start % 256 == 0
    for num_blocks in (group.num_usable - group.num_less, group.num_usable, most):
        adapter_bytes = border.total - num_blocks * MIB
        assert (1 + num_blocks) * MIB <= start + arena.numel() - adapter_bytes
    assert start + arena.numel() <= (blocks.num_blocks - 1) * MIB, "nor is the spare block"
    assert blocks.num_blocks * MIB - border.total <= 4 * MIB


def test_the_border_is_fixed_where_memory_cannot_be_given_back() -> None:
    odd = EngineConfig("m", kv_block_size=8)  # blocks whose parts would not be aligned
    assert plan_for(odd).border is None
    config = EngineConfig("m", host_cache_bytes=MIB)
    assert plan_for(config, HOST).border is not None
    group = EngineConfig("m", host_cache_bytes=MIB, tensor_parallel_size=2)
    assert plan_for(group, HOST).border is not None


@pytest.mark.parametrize(
    "proposers",
    [
        ProposerDemand(model_bytes=30 * MIB, kv_block_bytes=MIB // 2),
        ProposerDemand(eagle_bytes=30 * MIB, eagle_block_bytes=MIB // 2),
    ],
    ids=["draft model", "head"],
)
@pytest.mark.parametrize("memory", [HOST, DEVICE], ids=["host", "device"])
def test_a_cache_of_drafts_keeps_its_blocks_while_the_border_moves(
    proposers: ProposerDemand, memory: DeviceMemory
) -> None:
    config = EngineConfig("m", host_cache_bytes=MIB)
    plan = plan_for(config, memory, proposers=proposers)
    (group,), border = plan.kv_groups, plan.border
    assert border is not None
    assert plan.num_draft_blocks == group.num_usable, "as many as at the start"
    assert border.total == plan.arena_bytes + group.num_usable * MIB, "of which drafts have none"


def test_windows_keep_their_blocks_while_the_border_moves() -> None:
    windowed = KvGroup((1,), AttentionWindow(64), 0, 2)
    whole = KvGroup((0,), None, 0, 2)
    plan = plan_for(EngineConfig("m", host_cache_bytes=200 * MIB), HOST, windowed, whole)
    assert [group.may_move for group in plan.kv_groups] == [False, True]
