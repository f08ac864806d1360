"""What is not divided among ranks yet is refused by the name of its option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig, KvDtype, Quantization
from loraplex.engine.errors import InvalidParameter, UnsupportedModel
from loraplex.engine.ranks.rank_threads import num_cores, threads_per_rank
from support.engine import LocalEngine
from support.families import SERVED, save_family
from support.ranks import followers_as_threads, run_sharded


def test_expert_parallelism_requires_several_ranks() -> None:
    with pytest.raises(
        InvalidParameter, match="requires --tensor-parallel-size above 1"
    ) as refusal:
        EngineConfig("base", enable_expert_parallel=True)
    assert refusal.value.param == "enable_expert_parallel"


def test_expert_parallelism_is_refused_for_a_base_without_experts(tmp_path: Path) -> None:
    base = save_family(tmp_path, *SERVED["llama"])
    config = EngineConfig(
        str(base), device="cpu", tensor_parallel_size=2, enable_expert_parallel=True
    )
    with pytest.raises(UnsupportedModel, match="not supported for llama: it has no experts"):
        run_sharded(config, 2, lambda _base, _rank: None)


@pytest.mark.parametrize(
    ("param", "settings"),
    [
        ("speculation", {"speculation": ("ngram", "early_exit:1")}),
        ("speculation", {"speculation": ("quantized:int8",)}),
        ("kv_dtype", {"kv_dtype": KvDtype.INT4}),
        ("async_scheduling", {"async_scheduling": True}),
    ],
)
def test_an_option_that_is_not_served_with_stages_is_refused(
    param: str, settings: dict[str, Any]
) -> None:
    EngineConfig("base", tensor_parallel_size=2, **settings)
    with pytest.raises(InvalidParameter, match="--pipeline-parallel-size above 1") as refusal:
        EngineConfig("base", pipeline_parallel_size=2, **settings)
    assert refusal.value.param == param


def test_the_ranks_share_the_cores_unless_the_operator_sets_a_number() -> None:
    config = EngineConfig("base", tensor_parallel_size=4)
    assert threads_per_rank(config, 4) == max(1, num_cores() // 4)
    assert threads_per_rank(config, 1) == num_cores(), "the others are on other hosts"
    assert threads_per_rank(replace(config, num_threads=7), 4) == 7


def test_an_engine_of_ranks_reports_its_plan_and_what_it_does_not_serve(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    alone = LocalEngine(model, tmp_path, dtype="float32", num_threads=1)
    with followers_as_threads():
        engine = LocalEngine(
            model, tmp_path, dtype="float32", num_threads=1, tensor_parallel_size=2
        )
        engine.close()
    alone.close()
    info, expected = engine.core.info, alone.core.info
    assert "tensor parallelism over 2 ranks; all sizes are of each" in info.memory_plan
    assert "embedding and output head: 64 of 128 tokens" in info.memory_plan
    assert info.num_kv_blocks == 2 * expected.num_kv_blocks, "a rank has half of the KV heads"
    assert info.layout == expected.layout, "adapters of one serve on the other"
    assert info.base_id == expected.base_id
    assert info.runtime_id != expected.runtime_id, "a sum of parts rounds in another way"
    assert info.kv_policy_obstacle is None
    assert any(
        line.startswith("self-test: the ranks change logits by") for line in info.memory_plan
    )


def test_a_quantized_base_of_ranks_is_reported_as_that_of_one_rank(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", *SERVED["llama"])
    settings: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "quantization": Quantization.INT4,
        "embedding_quantization": Quantization.INT8,
    }
    alone = LocalEngine(model, tmp_path, **settings)
    with followers_as_threads():
        engine = LocalEngine(model, tmp_path, **settings, tensor_parallel_size=2)
        engine.close()
    alone.close()
    info, expected = engine.core.info, alone.core.info
    assert info.quantization == expected.quantization == "int4"
    assert info.head_format == expected.head_format
    assert 2 * info.head_bytes == expected.head_bytes, "a rank has half of the tokens"
    assert info.layout == expected.layout
