"""The load is planned by the rules of a start: with what is planned it starts, with less it does
not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.errors import InsufficientMemory, InvalidParameter, UnsupportedModel
from loraplex.engine.memory.demands import BaseDemand
from loraplex.engine.memory.device_memory import DeviceMemory
from loraplex.engine.memory.kv_budget import MIB
from loraplex.engine.memory.kv_demands import kv_demands, kv_groups
from loraplex.engine.memory.plan import plan_memory
from loraplex.engine.model.expected_base import expect_base
from loraplex.engine.planning.load_needs import Load, LoadNeeds, LoadPlanner
from support.engine import LocalEngine
from support.families import SERVED, STATES, save_family
from support.marks import marked_slow

LOAD = Load(num_sequences=4, context=96, num_active=3, num_known=6, rank=8)
Started = tuple[str, Quantization, KvDtype]
STARTED: list[Started] = [
    ("llama", Quantization.NONE, KvDtype.AUTO),
    ("mixtral", Quantization.INT8, KvDtype.INT8),
    ("gemma", Quantization.INT4, KvDtype.INT4),
    ("llama", Quantization.INT8, KvDtype.INT4),
    ("mixtral", Quantization.NONE, KvDtype.AUTO),
    ("gemma", Quantization.NONE, KvDtype.INT8),
]


def planned(model: Path, **settings: object) -> tuple[EngineConfig, LoadNeeds]:
    config = EngineConfig(str(model), **{"device": "cpu", **settings})  # type: ignore[arg-type]
    return config, LoadPlanner(config).needs(LOAD)


def figure(lines: Sequence[str], pattern: str) -> float:
    """The number that the operator is told."""
    (found,) = [match for line in lines if (match := re.search(pattern, line))]
    return float(found[1])


@pytest.mark.parametrize("case", marked_slow(STARTED, slow=STARTED[3:]), ids=str)
def test_a_started_engine_reports_what_was_planned(case: Started, tmp_path: Path) -> None:
    family, quantization, kv_dtype = case
    base = save_family(tmp_path, *SERVED[family])
    settings = {"quantization": quantization, "kv_dtype": kv_dtype}
    _, needs = planned(base, **settings)
    engine = LocalEngine(
        base,
        tmp_path,
        **settings,
        max_num_seqs=LOAD.num_sequences,
        max_model_len=LOAD.context,
        kv_cache_bytes=needs.kv_bytes,
        arena_bytes=needs.arena_bytes,
        host_cache_bytes=needs.host_cache_bytes,
    )
    info = engine.core.info
    engine.close()
    lines = info.memory_plan
    assert figure(lines, r", weights ([\d.]+) MiB") == pytest.approx(
        needs.weight_bytes / MIB, abs=0.051
    )
    num_blocks = figure(lines, r"KV cache (\d+) blocks of")
    block_bytes = figure(lines, r"KV cache .* tokens, (\d+) bytes each")
    assert block_bytes == needs.kv_bytes_per_token * info.kv_block_size
    assert num_blocks * info.kv_block_size >= LOAD.num_sequences * LOAD.context
    assert num_blocks == LOAD.num_sequences * -(-LOAD.context // info.kv_block_size)
    assert info.arena_bytes == needs.arena_bytes
    assert info.host_cache_bytes == needs.host_cache_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_plan_of_a_start_takes_the_device_and_nothing_smaller(
    device: str, tiny_base: Path
) -> None:
    config, needs = planned(tiny_base, device=device)
    config = replace(
        config,
        max_num_seqs=LOAD.num_sequences,
        max_model_len=LOAD.context,
        kv_cache_bytes=needs.kv_bytes,
        arena_bytes=needs.arena_bytes,
        host_cache_bytes=needs.host_cache_bytes,
    )
    demand = _demand(config, needs)
    available = needs.device_bytes - needs.weight_bytes
    plan = plan_memory(config, DeviceMemory(available, is_host=needs.is_host), demand)
    assert plan.num_kv_blocks * config.kv_block_size >= LOAD.num_sequences * LOAD.context
    with pytest.raises(InsufficientMemory):
        plan_memory(config, DeviceMemory(available - 8, is_host=needs.is_host), demand)


def _demand(config: EngineConfig, needs: LoadNeeds) -> BaseDemand:
    import torch

    base = expect_base(config, torch.device(config.device))
    assert base.kv_shapes is not None
    return BaseDemand(
        needs.weight_bytes,
        needs.activation_bytes,
        kv_demands(
            config,
            kv_groups(config, base.kv_shapes, max_model_len=LOAD.context),
            (base.kv_shapes,),
            base.kv_format,
            max_model_len=LOAD.context,
            device_type=base.device_type,
        ),
        graph_bytes=needs.graph_bytes,
    )


def test_one_sequence_more_than_the_most_does_not_fit(tiny_base: Path) -> None:
    planner = LoadPlanner(EngineConfig(str(tiny_base), device="cuda"))
    memory = planner.needs(replace(LOAD, num_sequences=37)).device_bytes + 5
    most = planner.most_sequences(LOAD, memory)
    assert most == 37
    assert planner.most_sequences(LOAD, 1) == 0


def test_ranks_need_less_each(tiny_base: Path) -> None:
    _, alone = planned(tiny_base)
    _, halves = planned(tiny_base, tensor_parallel_size=2)
    assert halves.ranks_per_stage == 2
    assert halves.kv_bytes * 2 == alone.kv_bytes
    assert alone.weight_bytes / 2 <= halves.weight_bytes < alone.weight_bytes
    assert alone.adapter_bytes / 2 <= halves.adapter_bytes < alone.adapter_bytes
    _, staged = planned(tiny_base, pipeline_parallel_size=2)
    assert len(staged.stage_weight_bytes) == 2
    assert staged.weight_bytes == max(staged.stage_weight_bytes) < alone.weight_bytes
    assert staged.kv_bytes * 2 == alone.kv_bytes
    assert staged.adapter_bytes * 2 == alone.adapter_bytes


def test_a_context_beyond_the_base_is_refused(tiny_base: Path) -> None:
    planner = LoadPlanner(EngineConfig(str(tiny_base), device="cpu"))
    with pytest.raises(InvalidParameter, match="longest sequence") as refusal:
        planner.needs(replace(LOAD, context=planner.max_model_len + 1))
    assert refusal.value.param == "context"


def test_proposers_that_a_start_refuses_are_refused(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="the base has no layer 5"):
        planned(tiny_base, speculation=("skip:5",))
    stateful = save_family(tmp_path, *STATES["qwen3_next"])
    planned(stateful, speculation=("ngram",))
    with pytest.raises(UnsupportedModel, match="a state cannot take back draft tokens"):
        planned(stateful, speculation=("skip:0",))


def test_the_graphs_of_drafting_layers_are_counted(tiny_base: Path) -> None:
    """A rounded copy has as many layers as the base, which has two."""

    def needed(*speculation: str, num_ranks: int = 1) -> int:
        settings = {"device": "cuda", "tensor_parallel_size": num_ranks}
        return planned(tiny_base, speculation=speculation, **settings)[1].graph_bytes

    one_layer = needed("skip:0") - needed()
    assert needed("early_exit:1") - needed() == one_layer > 0
    assert needed("quantized:int4") - needed() == 2 * one_layer
    assert needed("quantized:int4", "skip:0") - needed() == 3 * one_layer
    assert needed("skip:0", num_ranks=2) == needed(num_ranks=2), "ranks capture no drafts"
