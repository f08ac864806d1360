"""What is expected of a rank is what the rank holds once it has started."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.kv.groups import LayerKvShape
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.expected_base import expect_base
from loraplex.engine.model.rounded_linears import rounded_format
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.planning.load_needs import LoadPlanner
from support.families import SERVED, STATES, save_family
from support.marks import marked_slow
from support.ranks import run_sharded

Case = tuple[str, int, int, Quantization]
CASES: list[Case] = [
    ("llama", 2, 2, Quantization.INT8),
    ("gpt_oss-sinks-window", 2, 1, Quantization.NONE),
    ("llama", 2, 1, Quantization.NONE),
    ("mixtral", 2, 2, Quantization.INT8),
    ("deepseek_v3-mla", 2, 2, Quantization.NONE),
    ("gpt2-conv1d", 2, 2, Quantization.INT4),
    ("gemma", 1, 2, Quantization.INT8),
    ("phi3-fused", 2, 1, Quantization.INT8),
]


class Held(NamedTuple):
    """What a rank holds."""

    stage: int
    rank: int
    weight_bytes: int
    rounded_bytes: int
    kv_shapes: list[LayerKvShape]


def held(base: BaseModel, _rank: int) -> Held:
    return Held(
        base.stages.place.stage,
        base.stages.rank,
        base.weight_bytes,
        base.rounded_bytes,
        base.kv_shapes,
    )


@pytest.mark.parametrize("case", marked_slow(CASES, slow=CASES[2:]), ids=str)
def test_a_rank_holds_what_is_expected_of_it(case: Case, tmp_path: Path) -> None:
    family, size, num_stages, quantization = case
    config = EngineConfig(
        str(save_family(tmp_path, *SERVED[family])),
        quantization=quantization,
        device="cpu",
        tensor_parallel_size=size,
        pipeline_parallel_size=num_stages,
    )
    ranks = run_sharded(config, size, held, num_stages=num_stages)
    for stage in range(num_stages):
        expected = expect_base(config, torch.device("cpu"), stage=stage)
        first, *others = sorted(
            (rank for rank in ranks if rank.stage == stage), key=lambda rank: rank.rank
        )
        assert expected.weight_bytes == first.weight_bytes
        assert expected.kv_shapes == first.kv_shapes
        assert all(rank.weight_bytes <= first.weight_bytes for rank in others)


@pytest.mark.parametrize("case", ["llama", "deepseek_v3-mla", "mixtral"])
@pytest.mark.parametrize(
    ("weight_format", "size", "quantization"),
    [("int8", 2, Quantization.NONE), ("nf4", 2, Quantization.INT8), ("int4", 1, Quantization.INT8)],
)
def test_the_rounded_copy_of_a_rank_is_what_is_expected(
    case: str, weight_format: str, size: int, quantization: Quantization, tmp_path: Path
) -> None:
    kind, differences = SERVED[case]
    dense = {"first_k_dense_replace": 99} if case.startswith("deepseek") else {}
    config = EngineConfig(
        str(save_family(tmp_path, kind, {**differences, **dense})),
        quantization=quantization,
        device="cpu",
        tensor_parallel_size=size,
        speculation=(f"quantized:{weight_format}",),
    )
    expected = expect_base(config, torch.device("cpu"))
    if size == 1:
        bases = [held(load_base_model(config, rounded=rounded_format(config)), 0)]
    else:
        bases = run_sharded(config, size, held)
    assert bases[0].rounded_bytes == expected.rounded_bytes > 0
    assert bases[0].weight_bytes == expected.weight_bytes


def test_states_of_several_ranks_are_refused(tmp_path: Path) -> None:
    base = save_family(tmp_path, *STATES["qwen3_5"])
    config = EngineConfig(str(base), device="cpu", tensor_parallel_size=2)
    with pytest.raises(UnsupportedModel, match="only known at a start"):
        LoadPlanner(config)


def test_stages_on_cuda_are_refused_as_a_start_refuses_them(tmp_path: Path) -> None:
    base = save_family(tmp_path, *SERVED["llama"])
    config = EngineConfig(str(base), device="cuda", pipeline_parallel_size=2)
    with pytest.raises(UnsupportedModel, match="supported on the CPU only"):
        LoadPlanner(config)
