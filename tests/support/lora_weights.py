"""Adapters in a fake arena in which every element outside a matrix is NaN."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex.adapters.block import BlockPlan
from loraplex.adapters.layout import BaseLayout, Projection, Slice

GAP_ELEMENTS = 64


def make_layout(*projections: tuple[int, tuple[int, ...]]) -> BaseLayout:
    """A base of these projections, each (in_features, out_features of its slices)."""
    return BaseLayout(
        base_id="base",
        projections=tuple(
            Projection(tuple(Slice(f"{i}.{j}", in_features, out) for j, out in enumerate(outs)))
            for i, (in_features, outs) in enumerate(projections)
        ),
    )


class PoisonedWeights:
    """Satisfies AdapterWeights. Rows are put, removed and put again as in an arena."""

    def __init__(
        self,
        layout: BaseLayout,
        *,
        num_rows: int,
        dtype: torch.dtype = torch.float32,
        capacity: int = 1 << 20,
        device: str = "cpu",
    ) -> None:
        self.layout = layout
        memory = torch.full((64 + capacity,), torch.nan, dtype=dtype, device=device)
        self.flat = memory[64:]  # as in a memory that others have a part of
        self.table = torch.zeros(num_rows, len(layout.slices), 3, dtype=torch.int64, device=device)
        self.vectors = torch.full_like(self.table, -1)
        self.generations = [0] * num_rows
        self._row_tables: list[list[list[int]]] = self.table.tolist()
        self.row_auxiliary: list[dict[int, object]] = [{} for _ in range(num_rows)]
        self.replacing_rows: set[int] = set()
        self.row_vocabularies: dict[int, int] = {}
        self._generator = torch.Generator().manual_seed(0)
        self._end = GAP_ELEMENTS

    @property
    def row_tables(self) -> Sequence[Sequence[Sequence[int]]]:
        return self._row_tables

    def put(self, row: int, ranks: Mapping[int, int]) -> int:
        """A new random adapter of these ranks by slice index; return its generation."""
        plan = BlockPlan(self.layout, ranks)
        if self._end + plan.num_elements > self.flat.numel():
            self._end = GAP_ELEMENTS  # around: only for rows that were removed before
        is_touched = plan.table[:, 2:] > 0
        table = plan.table + is_touched * np.array([self._end, self._end, 0])
        self._end += plan.num_elements + GAP_ELEMENTS
        self.table[row] = torch.from_numpy(table)
        self._row_tables[row] = table.tolist()
        self.generations[row] += 1
        for part, (a_offset, b_offset, rank) in zip(
            self.layout.slices, table.tolist(), strict=True
        ):
            num_rows = rank * part.num_experts
            self._fill(a_offset, num_rows, part.in_features, part.in_features**-0.5)
            self._fill(b_offset, num_rows, part.out_features, rank**-0.5 if rank else 0)
        return self.generations[row]

    def put_vectors(self, row: int, slice_index: int, kinds: Sequence[int]) -> None:
        """Random vectors for a slice, of these places in `vectors`."""
        width = self.layout.slices[slice_index].out_features
        for kind in kinds:
            self.vectors[row, slice_index, kind] = self._end
            self._fill(self._end, 1, width, 1.0)
            self._end += -(-width // GAP_ELEMENTS) * GAP_ELEMENTS + GAP_ELEMENTS
        self.row_auxiliary[row][slice_index] = "vectors"

    def vector(self, row: int, slice_index: int, kind: int) -> Tensor | None:
        """The view of one, if there is one."""
        offset = int(self.vectors[row, slice_index, kind])
        width = self.layout.slices[slice_index].out_features
        return None if offset < 0 else self.flat[offset : offset + width]

    def matrices(self, row: int, slice_index: int) -> tuple[Tensor, Tensor]:
        """Views of A `[rank, in]` and B `[rank, out]`; of experts, one under another."""
        a_offset, b_offset, rank = self._row_tables[row][slice_index]
        part = self.layout.slices[slice_index]
        num_rows = rank * part.num_experts
        return (
            self.flat[a_offset : a_offset + num_rows * part.in_features].view(num_rows, -1),
            self.flat[b_offset : b_offset + num_rows * part.out_features].view(num_rows, -1),
        )

    def remove(self, row: int) -> None:
        """Poison what the row held and empty it."""
        for index in range(len(self.layout.slices)):
            if self._row_tables[row][index][2]:
                for matrix in self.matrices(row, index):
                    matrix.fill_(torch.nan)
        self.table[row] = 0
        self._row_tables[row] = self.table[row].tolist()

    def _fill(self, offset: int, rank: int, width: int, scale: float) -> None:
        values = torch.randn(rank * width, generator=self._generator) * scale
        self.flat[offset : offset + rank * width] = values.to(self.flat)


POPULARITIES = ("identical", "uniform", "zipf", "distinct")


def draw_rows(popularity: str, num_tokens: int, num_rows: int, *, seed: int = 0) -> list[int]:
    """The adapter row of each of `num_tokens` requests; one in five runs the base (-1)."""
    rng = random.Random(f"{popularity} {num_tokens} {num_rows} {seed}")
    weights = {
        "identical": [1.0] + [0.0] * (num_rows - 1),
        "uniform": [1.0] * num_rows,
        "zipf": [1 / (rank + 1) ** 1.5 for rank in range(num_rows)],
    }.get(popularity)
    if weights is None:
        rows = [index % num_rows for index in range(num_tokens)]
    else:
        rows = rng.choices(range(num_rows), weights, k=num_tokens)
    return [-1 if rng.random() < 0.2 else row for row in rows]


_TOLERANCES = {  # (rtol, atol)
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 4e-3),
    torch.bfloat16: (2e-2, 4e-2),
}


def assert_lora_close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of summation in this dtype."""
    rtol, atol = _TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
