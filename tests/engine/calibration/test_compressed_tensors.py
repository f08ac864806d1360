"""The tensors that are written, against the compressed-tensors library."""

from __future__ import annotations

from typing import Any

import compressed_tensors.compressors as compressors
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from loraplex.engine.calibration.compressed_tensors import quantization_config, stored_parts
from loraplex.engine.calibration.grid import round_to_nearest
from loraplex.engine.calibration.method import CodeFormat
from loraplex.engine.calibration.recipe import Recipe

RECIPES = [
    Recipe(code_format=CodeFormat.INT4, group_size=16),
    Recipe(code_format=CodeFormat.INT4, group_size=0),
    Recipe(code_format=CodeFormat.INT8, group_size=16),
    Recipe(code_format=CodeFormat.INT8, group_size=0),
    Recipe(code_format=CodeFormat.FP8),
]


def scheme_of(recipe: Recipe) -> tuple[Any, Any]:
    """The library's own reading of the configuration, and its compressor."""
    config = QuantizationConfig.model_validate(quantization_config(recipe, ["lm_head"]))
    scheme = config.config_groups["group_0"]
    assert isinstance(scheme, QuantizationScheme)
    return scheme, compressors.BaseCompressor.get_value_from_registry(config.format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.code_format}-{r.group_size}")
def test_the_library_reads_the_values_that_were_written(recipe: Recipe, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 80, generator=torch.Generator().manual_seed(0))
    written = round_to_nearest(weight, recipe.grid, group=recipe.group(80), dtype=dtype)
    scheme, compressor = scheme_of(recipe)
    read = compressor.decompress(stored_parts(written), scheme)["weight"]
    assert read.dtype == dtype
    assert torch.equal(read, written.dequantize(dtype))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.code_format}-{r.group_size}")
def test_the_library_writes_the_same_tensors(recipe: Recipe) -> None:
    weight = torch.randn(24, 80, generator=torch.Generator().manual_seed(0))
    parts = stored_parts(
        round_to_nearest(weight, recipe.grid, group=recipe.group(80), dtype=torch.float32)
    )
    scheme, compressor = scheme_of(recipe)
    state = {"weight": weight, "weight_scale": parts["weight_scale"]}
    for name, tensor in compressor.compress(state, scheme).items():
        assert torch.equal(tensor.view(parts[name].dtype), parts[name]), name
