"""What is planned for a trainer is what a trainer of these jobs holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.planning.load_needs import Load, LoadPlanner
from loraplex.engine.tuning.adapter import add_adapter, trained_parameters
from loraplex.engine.tuning.base import TunableBase, load_tunable_base
from loraplex.engine.tuning.frozen_linear import FrozenLinear
from loraplex.engine.tuning.memory_needs import shapes_of
from loraplex.engine.tuning.methods import Method
from loraplex.engine.tuning.trainer_needs import PROCESS_BYTES, RecipeLimits
from loraplex.kernels.int8_linear_cpu import serves_int8_panels
from loraplex.kernels.linear_packing import prefers_bytes
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.families import SERVED, save_family
from support.models import save_byte_tokenizer
from support.tuning import recipe

LIMITS = RecipeLimits(rank=4, batch_size=3, max_tokens=64)
QUANTIZATIONS = (Quantization.NONE, Quantization.INT8)
LOAD = Load(num_sequences=1, context=64, num_active=1, num_known=1, rank=4)


def tensors_of(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    assert isinstance(values, QuantizedWeight)
    parts = (getattr(values, name) for name in values.__dataclass_fields__)
    return [part for part in parts if isinstance(part, Tensor)]


def held_bytes(base: TunableBase) -> int:
    """Of all tensors that the trainer's base keeps."""
    frozen = [each for each in base.model.modules() if isinstance(each, FrozenLinear)]
    values = [tensor for each in frozen for tensor in tensors_of(each.__dict__["_values"])]
    return sum(each.nbytes for each in [*base.model.parameters(), *values])


@pytest.mark.parametrize(
    ("family", "quantization", "method", "num_rows"),
    [
        *(("llama", quantization, Method.SUPERVISED, 3) for quantization in QUANTIZATIONS),
        *(("gemma", quantization, Method.SUPERVISED, 3) for quantization in QUANTIZATIONS),
        ("llama", Quantization.NONE, Method.DPO, 6),
    ],
)
def test_a_planned_trainer_takes_what_a_loaded_one_does(
    family: str, quantization: Quantization, method: Method, num_rows: int, tmp_path: Path
) -> None:
    folder = save_family(tmp_path, *SERVED[family])
    save_byte_tokenizer(folder)
    config = EngineConfig(str(folder), device="cpu", dtype="float32", quantization=quantization)
    base = load_tunable_base(config)
    held = held_bytes(base)
    linears = [base.model.get_submodule(path) for path in base.linears]
    largest = max(_size(each) for each in linears)
    model = add_adapter(base, recipe(rank=LIMITS.rank))
    step = shapes_of(base, trained_parameters(model).values()).bytes(num_rows=num_rows, width=64)
    expected = PROCESS_BYTES + held + 4 * largest + step
    planner = LoadPlanner(config)
    planned = planner.needs(replace(LOAD, trainer=replace(LIMITS, method=method))).trainer_bytes
    if base.model.config.tie_word_embeddings:  # on the CPU the engine packs the head beside it
        expected += base.model.get_output_embeddings().weight.nbytes
    is_onednn = prefers_bytes() and not serves_int8_panels()
    if quantization is Quantization.INT8 and is_onednn:
        # The plan counts the base as it is served: with an int64 zero point for each output.
        expected += 8 * sum(each.out_features for each in linears)
    assert planned == expected
    assert planner.needs(LOAD).trainer_bytes == 0


def test_a_trainer_holds_the_whole_base_beside_ranks_that_hold_parts(tmp_path: Path) -> None:
    folder = save_family(tmp_path, *SERVED["llama"])
    load = replace(LOAD, trainer=LIMITS)
    one, two = (
        LoadPlanner(EngineConfig(str(folder), device="cpu", tensor_parallel_size=ranks)).needs(load)
        for ranks in (1, 2)
    )
    assert two.weight_bytes < one.weight_bytes
    assert two.trainer_bytes == one.trainer_bytes
    assert two.device_bytes == two.weight_bytes + two.pool_bytes + two.reserve_bytes + (
        two.trainer_bytes
    )


def _size(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.numel()
