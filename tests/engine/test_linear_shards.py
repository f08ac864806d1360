"""A rank's part of quantized layers, and the largest inputs of all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from loraplex.adapters.layout_part import SliceRange
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.base_model import group_weights
from loraplex.engine.model.linear_shards import LinearShards, RankExchange
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.shards.rank_sums import RankSums
from loraplex.engine.shards.shard_plan import Shard, ShardStyle
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.ranks import run_ranks

OUT, IN = 2_000, 96
"""More outputs than are quantized at a time."""


def row_shard(rank: int, size: int) -> Shard:
    part = IN // size
    return Shard(ShardStyle.ROW, SliceRange(range(rank * part, (rank + 1) * part), range(OUT)))


@pytest.mark.parametrize("form", WeightFormat)
def test_a_rank_has_the_codes_and_scales_of_the_whole_layer(form: WeightFormat) -> None:
    layer = nn.Linear(IN, OUT, bias=False)
    whole = quantize(layer.weight.detach(), form).dequantize()

    def part(ranks: RankSums) -> Tensor:
        shards = LinearShards(
            {"down": row_shard(ranks.place.rank, 2)}, ranks, multiplies_bytes=False
        )
        (weight,) = group_weights([("down", layer)], LoadQuantization(form), shards)
        assert isinstance(weight, QuantizedWeight)
        return weight.dequantize()

    assert torch.equal(torch.cat(run_ranks(2, part), dim=1), whole)


def test_an_excluded_layer_is_cut_unquantized() -> None:
    layer = nn.Linear(IN, OUT, bias=False)
    quantization = LoadQuantization(WeightFormat.INT4, excluded=frozenset({"down"}))

    def part(ranks: RankSums) -> Tensor:
        shards = LinearShards(
            {"down": row_shard(ranks.place.rank, 2)}, ranks, multiplies_bytes=False
        )
        (weight,) = group_weights([("down", layer)], quantization, shards)
        assert isinstance(weight, Tensor)
        return weight

    assert torch.equal(torch.cat(run_ranks(2, part), dim=1), layer.weight.detach())


def test_groups_that_cannot_be_divided_are_refused_by_name() -> None:
    weight = quantize(torch.randn(OUT, IN), WeightFormat.NF4, 32)
    without_zero = replace(weight, table=torch.arange(1.0, 17.0))

    def part(ranks: RankSums) -> None:
        shards = LinearShards(
            {"down": row_shard(ranks.place.rank, 4)}, ranks, multiplies_bytes=False
        )
        with pytest.raises(UnsupportedModel, match=r"down has groups of 32 .*4 ranks of 24"):
            shards.weight("down", without_zero)

    run_ranks(4, part)


@pytest.mark.parametrize("style", [ShardStyle.ROW, ShardStyle.SPLIT_ROW])
def test_the_largest_inputs_of_a_row_are_those_of_all_ranks(style: ShardStyle) -> None:
    x = torch.randn(3, IN)

    def largest(ranks: RankSums) -> Tensor:
        shard = row_shard(ranks.place.rank, 2)._replace(style=style)
        held = shard.held.inputs
        own = x if style is ShardStyle.SPLIT_ROW else x[:, held.start : held.stop]
        return RankExchange(shard, [OUT], ranks).largest_inputs(own)

    for found in run_ranks(2, largest):
        assert torch.equal(found, x.abs().amax(dim=1, keepdim=True))
