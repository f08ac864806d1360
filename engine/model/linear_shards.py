"""One rank's part of the linear layers, and how the ranks' results become whole.

A rank multiplies its part of each weight and of each adapter. Where later layers need the whole
result, the ranks exchange it behind the adapters' changes: a LoRA delta is part of the same sum, so
adapters cost no exchange of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...adapters.layout import Projection
from ...adapters.layout_part import SliceRange
from ...kernels.int8_linear import largest_of_rows
from ...kernels.quantized_part import part_of
from ..checkpoint.stored_weights import Values
from ..errors import UnsupportedModel
from ..shards.rank_sums import RankSums
from ..shards.shard_plan import Shard, ShardStyle


class RankExchange:
    """Makes the whole result of a projection of which each rank computes a part."""

    def __init__(self, shard: Shard, outs: Sequence[int], ranks: RankSums) -> None:
        """`outs`: this rank's outputs of each slice."""
        self.sums = shard.style.sums
        """Whether the whole result is the sum of the ranks'."""
        self._shard = shard
        self._ranks = ranks
        self._outs = list(outs)
        num_parts = 1 if self.sums else ranks.place.size
        self.slice_outs = [num_parts * size for size in outs]
        """The outputs of each slice in the whole result."""

    def inputs(self, x: Tensor) -> Tensor:
        """This rank's inputs for x `[n, in]`, which is what the layer before has computed."""
        if self._shard.style is not ShardStyle.SPLIT_ROW:
            return x
        held = self._shard.held.inputs
        return x[:, held.start : held.stop].contiguous()

    def largest_inputs(self, x: Tensor) -> Tensor:
        """The largest absolute value of each row's inputs on all ranks: fp32 `[n, 1]`, for x as of
        `inputs`. Codes of 8 bits have one scale for a whole row."""
        own = largest_of_rows(x)
        return own if self._shard.style is ShardStyle.SPLIT_ROW else self._ranks.largest(own)

    def whole(self, y: Tensor) -> Tensor:
        """The whole result `[n, sum(slice_outs)]` for this rank's y `[n, sum(outs)]`, the adapters'
        changes included."""
        if self.sums:
            return self._ranks.add(y)
        of_ranks = [part.split_with_sizes(self._outs, dim=-1) for part in self._ranks.gather(y)]
        return torch.cat(
            [part for of_slice in zip(*of_ranks, strict=True) for part in of_slice], -1
        )


class LinearShards:
    """Cuts a base's linear layers for one rank."""

    def __init__(
        self, shards: Mapping[str, Shard], ranks: RankSums, *, multiplies_bytes: bool
    ) -> None:
        """`shards`: the divided layers by path; the others are held whole. `multiplies_bytes`: as
        of `choose_linear`; all ranks must choose the same."""
        self.multiplies_bytes = multiplies_bytes
        self._shards = shards
        self._ranks = ranks

    @property
    def ranges(self) -> dict[str, SliceRange]:
        """The inputs and outputs that this rank holds, by the divided layers' paths."""
        return {path: shard.held for path, shard in self._shards.items()}

    def part(self, projection: Projection) -> Projection:
        """This rank's part of a projection. Raises UnsupportedModel if its slices are divided in
        different ways."""
        styles = {self._style(part.name) for part in projection.slices}
        if len(styles) > 1:
            names = ", ".join(part.name for part in projection.slices)
            raise UnsupportedModel(f"its plan divides {names} in different ways")
        return Projection(
            tuple(
                replace(part, in_features=len(held.inputs), out_features=len(held.outputs))
                if (held := self._held(part.name))
                else part
                for part in projection.slices
            )
        )

    def outputs(self, path: str, num_outputs: int) -> range:
        """This rank's outputs of a layer with so many."""
        held = self._held(path)
        return range(num_outputs) if held is None else held.outputs

    def inputs(self, path: str, rows: Values) -> Values:
        """This rank's inputs of some rows of a weight; a view of a tensor.

        Raises UnsupportedModel if the groups of a quantized weight cannot be divided.
        """
        held = self._held(path)
        if held is None:
            return rows
        if isinstance(rows, Tensor):
            return rows[:, held.inputs.start : held.inputs.stop]
        part = part_of(rows, range(rows.shape[0]), held.inputs)
        if part is None:
            raise UnsupportedModel(
                f"{path} has groups of {rows.group} inputs, which cannot be divided among "
                f"{self._ranks.place.size} ranks of {len(held.inputs)} inputs"
            )
        return part

    def weight(self, path: str, weight: Values) -> Values:
        """This rank's part of a whole weight `[out, in]`. Raises UnsupportedModel as `inputs`."""
        held = self.outputs(path, weight.shape[0])
        if isinstance(weight, Tensor):
            return self.inputs(path, weight[held.start : held.stop])
        return self.inputs(path, weight.rows(held.start, held.stop))

    def bias(self, path: str, bias: Tensor) -> Tensor | None:
        """This rank's part of a whole bias `[out]`; None: another rank adds it to the sum."""
        shard = self._shards.get(path)
        if shard is None:
            return bias
        if shard.style.sums and self._ranks.place.rank:
            return None
        return bias[shard.held.outputs.start : shard.held.outputs.stop]

    def exchange(self, part: Projection) -> RankExchange | None:
        """How this rank's part of a projection becomes whole; None: the layers behind read it as
        it is."""
        shard = self._shards.get(part.slices[0].name)
        if shard is None or shard.style is ShardStyle.COLUMN:
            return None
        return RankExchange(shard, [each.out_features for each in part.slices], self._ranks)

    def _held(self, path: str) -> SliceRange | None:
        shard = self._shards.get(path)
        return None if shard is None else shard.held

    def _style(self, path: str) -> ShardStyle | None:
        shard = self._shards.get(path)
        return None if shard is None else shard.style
