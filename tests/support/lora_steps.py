"""One step's LoRA op with adapters of several ranks: complete, or one request alone."""

from __future__ import annotations

from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from loraplex.kernels.lora_batch import AdapterRun, LoraBatchBuilder, LoraTiles
from loraplex.kernels.lora_reference import add_lora_reference

from .lora_weights import PoisonedWeights, make_layout

RANKS = (1, 4, 7, 16, 64)
"""Of the adapter of each row."""


class LoraStep:
    """One projection of slices 1.. of a base, its adapters and one step's tokens."""

    def __init__(
        self,
        decode_rows: list[int],
        prefills: list[tuple[int, int]],
        *,
        in_features: int = 63,
        outs: tuple[int, ...] = (40, 17),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`prefills`: each (tokens, row)."""
        self.outs = outs
        self.weights = PoisonedWeights(
            make_layout((8, (8,)), (in_features, outs)),
            num_rows=len(RANKS) + 1,
            dtype=dtype,
            capacity=max(1 << 19, 2 * sum(RANKS) * (len(outs) * in_features + sum(outs))),
            device=device,
        )
        for row, rank in enumerate(RANKS):
            touched = range(1 + row % 2, 1 + len(outs))  # every other adapter skips a slice
            self.weights.put(row, dict.fromkeys(touched, rank))
        self.runs = [
            AdapterRun(num_tokens, row, 1)
            for num_tokens, row in [*((1, row) for row in decode_rows), *prefills]
        ]
        self._num_decodes = len(decode_rows)
        # A builder for CUDA would pin what it copies; the tiles are the same.
        self._builder = LoraBatchBuilder(self.weights, torch.device("cpu"))
        self.tiles = self._tiles(self.runs, num_decodes=self._num_decodes)
        rows = [run.row for run in self.runs for _ in range(run.num_tokens)]
        self.token_rows = torch.tensor(rows, dtype=torch.int32, device=device)
        self.x = torch.randn(len(rows), in_features).to(device, dtype)
        self.y = torch.randn(len(rows), sum(outs)).to(device, dtype)

    def run(self, module: ModuleType, tiles: LoraTiles | None = None) -> Tensor:
        """What `lora_triton` adds, by the kernels of this copy of the module."""
        return self._add(module, tiles or self.tiles, slice(len(self.x)))

    def _tokens_of(self, number: int) -> slice:
        """Of one of the runs."""
        ends = [0, *accumulate(run.num_tokens for run in self.runs)]
        return slice(ends[number], ends[number + 1])

    def _tiles_alone(self, number: int) -> LoraTiles:
        """Of a step that has one of the runs alone."""
        is_decode = number < self._num_decodes
        return self._tiles([self.runs[number]], num_decodes=int(is_decode))

    def reference(self) -> Tensor:
        expected = self.y.clone()
        table = self.weights.table[:, 1:]
        add_lora_reference(
            self.x, expected, self.weights.flat, table, self.token_rows, slice_outs=self.outs
        )
        return expected

    def _tiles(self, runs: list[AdapterRun], *, num_decodes: int) -> LoraTiles:
        tiles = self._builder.make_tiles(runs, num_decodes=num_decodes)
        return LoraTiles(tiles.tiles.to(self.weights.flat.device), tiles.max_rank)

    def _add(self, module: ModuleType, tiles: LoraTiles, tokens: slice) -> Tensor:
        result = self.y[tokens].clone()
        module.add_tiles(
            self.x[tokens],
            result,
            self.weights,
            self.token_rows[tokens],
            tiles,
            first_slice=1,
            slice_outs=self.outs,
        )
        return result

    def _shrink(self, module: ModuleType, tiles: LoraTiles, tokens: slice) -> Tensor:
        sums: Tensor = module.shrink_tiles(
            self.x[tokens],
            self.weights,
            self.token_rows[tokens],
            tiles,
            first_slice=1,
            num_slices=len(self.outs),
        )
        return sums

    def changed_alone(self, module: ModuleType) -> list[int]:
        """The runs of which a bit changes, of sums or result, where no other shares their step."""
        everything = slice(len(self.x))
        sums = self._shrink(module, self.tiles, everything)
        result = self._add(module, self.tiles, everything)
        changed = []
        for number, run in enumerate(self.runs):
            if run.row < 0:
                continue
            tokens, alone = self._tokens_of(number), self._tiles_alone(number)
            own = self._shrink(module, alone, tokens)
            ranks = [entry[2] for entry in self.weights.row_tables[run.row][1:]]
            is_same = torch.equal(self._add(module, alone, tokens), result[tokens])
            if not is_same or not all(
                torch.equal(own[:, :, index, :rank], sums[:, tokens, index, :rank])
                for index, rank in enumerate(ranks)
            ):
                changed.append(number)
        return changed
