"""The computed bytes and operations of steps, compared with manual counts, and the utilization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.memory.device_peak import measure_peak
from loraplex.engine.memory.model_cost import model_cost
from loraplex.engine.memory.utilization import (
    DevicePeak,
    KvReads,
    ModelCost,
    StepWork,
    Utilization,
)
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.tenant_labels import OTHER_TENANTS, TenantLabels
from loraplex.kernels.attention_window import AttentionWindow
from loraplex.kernels.linear_cpu import PanelLinear
from loraplex.kernels.quantize import WeightFormat
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.models import make_adapter, make_tiny_llama, save_byte_tokenizer


@dataclass
class Span:
    num_tokens: int
    context_len: int
    num_logits_rows: int = 1


COST = ModelCost(
    shared_bytes=1000, shared_parameters=500, head_parameters=70, kv_reads=(KvReads(8),)
)


def test_weights_are_read_once_a_step_and_multiplied_for_each_token() -> None:
    decode, prefill = Span(1, 10), Span(6, 6)
    work = COST.work([decode, prefill], adapter_bytes=33)
    read_and_written = 8 * (10 + 1 + 6 + 6)
    assert work == (1000 + read_and_written + 33, 2 * (500 * 7 + 70 * 2))


def test_layers_with_a_window_read_no_further_back() -> None:
    reads = (KvReads(8), KvReads(4, window=AttentionWindow(16), sinks=2))
    cost = ModelCost(shared_bytes=0, shared_parameters=0, head_parameters=0, kv_reads=reads)
    assert cost.work([Span(1, 100)]).num_bytes == 8 * 101 + 4 * (18 + 1)
    assert cost.work([Span(1, 10)]).num_bytes == (8 + 4) * 11


def test_a_token_reads_its_experts_and_a_large_batch_nearly_all() -> None:
    cost = ModelCost(
        shared_bytes=0,
        shared_parameters=0,
        head_parameters=0,
        kv_reads=(),
        expert_bytes=800,
        expert_parameters=400,
        expert_share=0.25,
    )
    assert cost.work([Span(1, 1)]) == pytest.approx((200, 200))
    assert cost.work([Span(2, 2)]) == pytest.approx((800 * (1 - 0.75**2), 400))
    assert cost.work([Span(100, 100)]).num_bytes == pytest.approx(800)


def test_utilization_is_the_work_since_the_last_snapshot_over_the_peak() -> None:
    utilization = Utilization(DevicePeak(bytes_per_second=1000, flops_per_second=400))
    utilization.add(StepWork(500, 100), seconds=1.0)
    utilization.add(StepWork(500, 100), seconds=1.0)
    first = utilization.snapshot()
    assert (first.memory, first.compute) == (0.5, 0.25)
    utilization.add(StepWork(250, 400), seconds=1.0)
    second = utilization.snapshot()
    assert (second.memory, second.compute) == (0.25, 1.0)
    assert (second.num_bytes, second.num_flops, second.step_seconds) == (1250, 600, 3.0)
    idle = utilization.snapshot()
    assert (idle.memory, idle.compute) == (0.0, 0.0)


def test_the_device_is_busy_for_the_part_of_the_time_that_steps_took() -> None:
    now = 100.0
    utilization = Utilization(DevicePeak(1000, 400), clock=lambda: now)
    assert utilization.snapshot().busy == 0.0, "no time has passed"
    now = 104.0
    for seconds in (0.5, 0.5):
        utilization.add(StepWork(1, 1), seconds)
    assert utilization.snapshot().busy == 0.25
    now = 106.0
    assert utilization.snapshot().busy == 0.0
    utilization.add(StepWork(1, 1), 3.0)  # it began before the last snapshot
    now = 108.0
    assert utilization.snapshot().busy == 1.0


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_cost_of_a_llama_is_its_linears_and_its_head(tmp_path: Path, is_tied: bool) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=is_tied)
    base = load_base_model(EngineConfig(str(tmp_path), device="cpu"))
    cost = model_cost(base, ())
    hidden, inner, kv = 64, 96, 32
    linears = 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    norms = 5 * hidden
    assert cost.shared_parameters == linears
    assert cost.head_parameters == base.vocab_size * hidden
    # The CPU library stores whole panels of 16 rows.
    has_panels = isinstance(base.packed_ends.head, PanelLinear)
    head_rows = -(-base.vocab_size // 16) * 16 if has_panels else base.vocab_size
    assert cost.shared_bytes == 4 * (linears + norms + head_rows * hidden)


def test_int8_weights_are_a_byte_each(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", quantization=Quantization.INT8)
    cost = model_cost(load_base_model(config), ())
    assert cost.shared_bytes < 4 * cost.head_parameters + 2 * cost.shared_parameters


def test_the_cost_of_a_mixtral_counts_the_experts_that_a_token_takes(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=save_byte_tokenizer(tmp_path),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    cost = model_cost(load_base_model(EngineConfig(str(tmp_path), device="cpu")), ())
    assert cost.expert_parameters == 2 * 4 * 3 * 32 * 48
    assert cost.expert_bytes == 4 * cost.expert_parameters
    assert cost.expert_share == 0.5


def test_gemma_4_has_its_own_name_for_the_experts_of_a_token(tmp_path: Path) -> None:
    settings = {
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 1},
        **{"moe_intermediate_size": 48, "num_kv_shared_layers": 0, "global_head_dim": 16},
        **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128},
        "layer_types": ["sliding_attention", "full_attention"],
    }
    path = save_family(tmp_path, "gemma4_text", settings)
    cost = model_cost(load_base_model(EngineConfig(str(path), device="cpu")), ())
    assert cost.expert_parameters > 0
    assert cost.expert_share == 0.25


@pytest.mark.parametrize("case", ["gpt2-conv1d", "deepseek_v2-mla", "gpt_oss-sinks-window"])
def test_the_cost_of_a_family_leaves_out_only_norms_and_tables(case: str, tmp_path: Path) -> None:
    base = load_base_model(EngineConfig(str(save_family(tmp_path, *SERVED[case])), device="cpu"))
    cost = model_cost(base, ())
    tables = base.weight_bytes - cost.shared_bytes - cost.expert_bytes
    if base.ends.are_tied:
        tables -= 4 * cost.head_parameters  # the packed head has a copy
    counted = cost.shared_parameters + cost.expert_parameters + cost.head_parameters + tables // 4
    assert 0.97 * base.num_parameters < counted <= base.num_parameters


@pytest.mark.parametrize("weight_format", [None, WeightFormat.INT8, WeightFormat.INT4])
def test_the_peak_is_what_a_copy_and_a_matmul_reach(weight_format: WeightFormat | None) -> None:
    quantization = LoadQuantization(weight_format)
    peak = measure_peak(torch.device("cpu"), torch.float32, quantization=quantization, threads=1)
    assert 1e8 < peak.bytes_per_second < 1e13
    assert 1e8 < peak.flops_per_second < 1e15


def test_tenants_beyond_the_limit_share_a_label() -> None:
    labels = TenantLabels(max_tenants=2)
    assert [labels[tenant] for tenant in "abcab"] == ["a", "b", OTHER_TENANTS, "a", "b"]


def test_a_running_engine_tells_what_it_did(tmp_path: Path) -> None:
    base = make_tiny_llama(tmp_path / "base")
    engine = LocalEngine(base, tmp_path)
    key = engine.add_adapter(make_adapter(base, tmp_path / "adapter", seed=1), "globex")
    prompt = list(range(32))
    engine.submit(prompt, tenant_id="acme", max_tokens=4, ignore_eos=True)
    engine.submit(prompt, key, max_tokens=4, ignore_eos=True)
    engine.run()
    engine.submit(prompt, tenant_id="acme", max_tokens=4, ignore_eos=True)
    engine.step()
    running = engine.core.stats()
    assert running.kv_usage > 0
    engine.run()
    stats = engine.core.stats()
    assert stats.kv_usage == 0
    assert stats.num_cached_tokens == 16  # the last block's token is computed again
    assert stats.num_prefix_query_tokens == 3 * len(prompt)
    assert dict(stats.tenant_service) == {"acme": 2 * (32 + 4) - 16, "globex": 32 + 4}
    assert stats.num_step_sequences == 3 * 4  # the first token comes with the prompt's step
    assert stats.utilization.step_seconds > 0
    cost = model_cost(load_base_model(EngineConfig(str(base), device="cpu")), ())
    num_tokens = 3 * (32 + 3) - 16
    expected = 2 * (cost.shared_parameters * num_tokens + cost.head_parameters * 12)
    assert stats.utilization.num_flops == expected
    assert stats.utilization.num_bytes > stats.num_steps * cost.shared_bytes
    assert 0 < running.utilization.memory < 2
    engine.close()
