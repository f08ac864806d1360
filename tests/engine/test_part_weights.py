"""A rank's part of linear layers is read, quantized and cut a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loraplex.adapters.layout_part import SliceRange
from loraplex.engine.model.linear_shards import LinearShards
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.part_weights import part_weights
from loraplex.engine.shards.rank_sums import RankSums
from loraplex.engine.shards.shard_plan import Shard, ShardStyle
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_weight import QuantizedWeight
from support.ranks import run_ranks

OUT, IN = 192, 4_096
MOST_NUMBERS = 1 << 18


class Recorded:
    """Reads rows of a weight, and remembers which."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.read: list[range] = []

    def __call__(self, rows: range) -> Tensor:
        self.read.append(rows)
        return self.weight[rows.start : rows.stop]


def recorded_layer() -> tuple[nn.Linear, Recorded]:
    layer = nn.Linear(IN, OUT, bias=False)
    reader = Recorded(layer.weight.detach())
    layer.__dict__["row_reader"] = lambda: reader
    return layer, reader


def column_shards(ranks: RankSums, *paths: str) -> LinearShards:
    rank, size = ranks.place
    half = range(rank * OUT // size, (rank + 1) * OUT // size)
    shard = Shard(ShardStyle.COLUMN, SliceRange(range(IN), half))
    return LinearShards(dict.fromkeys(paths, shard), ranks, multiplies_bytes=False)


def test_a_rank_reads_its_own_rows_and_few_at_a_time() -> None:
    def read(ranks: RankSums) -> list[range]:
        layer, reader = recorded_layer()
        shards = column_shards(ranks, "up")
        part_weights([("up", layer)], LoadQuantization(WeightFormat.INT8), shards)
        return reader.read

    for rank, pieces in enumerate(run_ranks(2, read)):
        rows = [row for piece in pieces[1:] for row in piece]  # the first one tells the form
        assert rows == list(range(rank * OUT // 2, (rank + 1) * OUT // 2))
        assert max(len(piece) for piece in pieces) * IN <= MOST_NUMBERS < len(rows) * IN


def test_siblings_of_one_form_become_one_weight() -> None:
    def part(ranks: RankSums) -> Tensor:
        layers = [(path, recorded_layer()[0]) for path in ("gate", "up")]
        shards = column_shards(ranks, "gate", "up")
        (weight,) = part_weights(layers, LoadQuantization(WeightFormat.NF4), shards)
        half = shards.ranges["up"].outputs
        rows = [layer.weight.detach()[half.start : half.stop] for _, layer in layers]
        assert isinstance(weight, QuantizedWeight)
        expected = quantize(torch.cat(rows), WeightFormat.NF4).dequantize()
        return (weight.dequantize() - expected).abs().max()

    assert run_ranks(2, part) == [0, 0]


def test_siblings_of_other_forms_stay_apart() -> None:
    quantization = LoadQuantization(WeightFormat.INT4, excluded=frozenset({"gate"}))

    def parts(ranks: RankSums) -> list[type]:
        layers = [(path, recorded_layer()[0]) for path in ("gate", "up")]
        weights = part_weights(layers, quantization, column_shards(ranks, "gate", "up"))
        return [type(weight) for weight in weights]

    assert run_ranks(2, parts) == [[Tensor, QuantizedWeight]] * 2
