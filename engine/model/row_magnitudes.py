"""DoRA on layers of which each rank has a part of the inputs.

The factor of an output is its magnitude divided by the length of a row of W + sBA. The square of
that length is the sum of the ranks' own: each computes it over its inputs, rank 0 adds them, and
every rank folds the same factors into its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...adapters.block import ExtraKind
from ...adapters.host_cache import HostBlock
from ...adapters.layout import BaseLayout
from .adapted_module import ExtendedModule
from .block_preparation import (
    Matrices,
    Place,
    adapted_squares,
    check_finite,
    fold_magnitude,
    slice_columns,
)

Squares = npt.NDArray[np.float64]
"""`[out]` of one slice."""


class RowMagnitudes:
    """Completes the blocks that `BlockPreparation` has left with their own magnitudes."""

    def __init__(self, layout: BaseLayout, modules: Iterable[ExtendedModule]) -> None:
        """`layout`: this rank's. `modules`: those with a part of the inputs."""
        bases = {module.projection: module.base_weights for module in modules}
        self._places = {
            index: Place(part, bases[projection], columns)
            for projection, indices in layout.projection_ranges()
            if projection in bases
            for index, (part, columns) in zip(indices, slice_columns(projection), strict=True)
        }

    def squares(self, block: HostBlock) -> list[Squares]:
        """This rank's squares for each magnitude that is to be completed, in the block's order."""
        return [
            adapted_squares(matrices, place).numpy()
            for matrices, _, place in self._magnitudes(block)
        ]

    def complete(self, block: HostBlock, squares: Sequence[Squares]) -> None:
        """Fold the factors into the block, given the sums over all ranks.

        Raises AdapterUnavailable if a served value is not finite.
        """
        held = list(self._magnitudes(block))
        for (matrices, magnitude, _), whole in zip(held, squares, strict=True):
            fold_magnitude(matrices, magnitude, torch.from_numpy(whole.copy()))
            check_finite(magnitude, ExtraKind.MAGNITUDE)

    def _magnitudes(self, block: HostBlock) -> Iterator[tuple[Matrices, Tensor, Place]]:
        for placed in block.auxiliary:
            index = placed.extra.slice_index
            if placed.extra.kind is ExtraKind.MAGNITUDE and index in self._places:
                place = self._places[index]
                matrices = Matrices.of(block.tensor, block.table[index], place.part)
                end = placed.offset + placed.extra.num_elements
                yield matrices, block.tensor[placed.offset : end], place
