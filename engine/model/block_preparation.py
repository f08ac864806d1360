"""Converts an adapter's original values to the served values where these depend on the base.

It runs once per load, in the loader thread, before the block is copied to the device. Large tensors
are processed in pieces of bounded size. After each slice the thread pauses for as long as it
worked, so that running steps keep most of the machine.

DoRA serves g (W + sBA) in place of W + sBA, with one factor per output row, g = m / |W + sBA|. The
norm of a row follows from that of W's row, which the base knows, and from products with A and B:

    |w + b A|² = |w|² + 2 b · (A wᵀ) + b (A Aᵀ) bᵀ        w a row of W, b the same row of sB

so the base's weight is multiplied by A and never unpacked. B is served multiplied by g;
`slice_auxiliary` adds the base's own result times g - 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...adapters.added_tokens import MAX_ADDED_TOKENS
from ...adapters.block import BlockHeader, BlockPlan, Extra, ExtraKind
from ...adapters.block_reader import PIECE_ELEMENTS
from ...adapters.classification import MAX_LABELS
from ...adapters.errors import AdapterUnavailable, ObjectCorrupt
from ...adapters.layout import BaseLayout, Projection, Slice, SliceKind
from .adapted_module import BaseWeights, ExtendedModule

_PIECE_RANKS = 16
"""Rows of A that the base multiplies at a time."""
_PIECE_COLUMNS = 4096
_BIASES = frozenset({ExtraKind.LORA_BIAS, ExtraKind.BIAS})
_CHANGE_MATRICES = frozenset({ExtraKind.MAGNITUDE, ExtraKind.LORA_BIAS})
_LINEAR_AUXILIARY = frozenset(ExtraKind) - {ExtraKind.DRAFT_HEAD}
_EMBEDDING_AUXILIARY = frozenset({ExtraKind.MAGNITUDE, ExtraKind.MATRIX, ExtraKind.TOKEN_ROWS})


class BlockPreparation:
    """Prepares blocks for one base; satisfies `block_reader.Prepare`."""

    def __init__(
        self,
        layout: BaseLayout,
        modules: Iterable[ExtendedModule],
        *,
        partial: Iterable[ExtendedModule] = (),
        adds_vectors: bool = True,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        """modules: those for which adapters may hold more than A and B. partial: those of them of
        which other ranks have the rest of the inputs; `RowMagnitudes` prepares their magnitudes.
        adds_vectors: this rank adds the biases of their adapters, and no other rank.

        rest: called with the seconds of work just done.
        """
        bases = {module.projection: module.base_weights for module in modules}
        bases_of_parts = {module.projection: module.base_weights for module in partial}
        self._places = [
            Place(part, {**bases, **bases_of_parts}.get(projection), columns)
            for projection in layout.projections
            for part, columns in slice_columns(projection)
        ]
        self._partial = {
            index
            for projection, indices in layout.projection_ranges()
            if projection in bases_of_parts
            for index in indices
        }
        self._adds_vectors = adds_vectors
        self._rest = rest

    def __call__(self, block: Tensor, header: BlockHeader, plan: BlockPlan) -> None:
        """Change the block `[num_elements]` in place.

        Raises ObjectCorrupt if an auxiliary tensor does not fit its slice, AdapterUnavailable if a
        served value is not finite in the block's dtype or this base does not support it.
        """
        for placed in plan.placed_auxiliary:
            started_at = time.perf_counter()
            extra = placed.extra
            if extra.kind is ExtraKind.DRAFT_HEAD:
                continue  # of the form that this engine serves: no part holds another one
            place = self._places[extra.slice_index]
            _check(extra, place.part, has_matrices=extra.slice_index in header.ranks)
            if extra.kind is ExtraKind.CLASSIFICATION_HEAD:
                continue  # served as it is, whatever the base's output head is
            if place.base is None:
                raise AdapterUnavailable(f"{place.part.name} serves A and B only, no {extra.kind}")
            values = block[placed.offset : placed.offset + extra.num_elements]
            is_partial = extra.slice_index in self._partial
            if is_partial and not self._adds_vectors and extra.kind in _BIASES:
                values.zero_()
                continue
            match extra.kind:
                case ExtraKind.MAGNITUDE if is_partial:
                    continue
                case ExtraKind.MAGNITUDE:
                    matrices = Matrices.of(block, plan.table[extra.slice_index], place.part)
                    fold_magnitude(matrices, values, adapted_squares(matrices, place))
                case ExtraKind.LORA_BIAS:
                    values *= header.scales[extra.slice_index]
                case ExtraKind.BIAS:
                    if place.base.bias is not None:
                        values -= place.base.bias[place.columns].to(values)
                case ExtraKind.MATRIX | ExtraKind.TOKEN_ROWS:
                    continue  # served as they are; finite since they were read
            check_finite(values, extra.kind)
            self._rest(time.perf_counter() - started_at)


@dataclass(frozen=True, slots=True)
class Place:
    """One slice of the base."""

    part: Slice
    base: BaseWeights | None
    columns: slice
    """Which of its projection's outputs are this slice's."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """A and B of one slice, views of the block."""

    a: Tensor
    """`[rank, in]`."""
    b: Tensor
    """`[rank, out]`, the scale folded in."""

    @classmethod
    def of(cls, block: Tensor, entry: npt.NDArray[np.int64], part: Slice) -> Matrices:
        """`entry`: the slice's in the block's table."""
        a_offset, b_offset, rank = entry.tolist()
        a = block[a_offset : a_offset + rank * part.in_features]
        b = block[b_offset : b_offset + rank * part.out_features].view(rank, part.out_features)
        if part.kind is SliceKind.EMBEDDING:
            return cls(a.view(part.in_features, rank).T, b)
        return cls(a.view(rank, part.in_features), b)


def slice_columns(projection: Projection) -> Iterator[tuple[Slice, slice]]:
    """Each slice with its columns in the projection's result."""
    start = 0
    for part in projection.slices:
        yield part, slice(start, start + part.out_features)
        start += part.out_features


def fold_magnitude(matrices: Matrices, magnitude: Tensor, squares: Tensor) -> None:
    """Turn magnitudes `[out]` into factors less 1, and fold the factors into B.

    squares: fp64 `[out]`, see `adapted_squares`. Raises AdapterUnavailable if a value of B is not
    finite then.
    """
    factors = magnitude.double() / squares.sqrt()
    magnitude.copy_(factors - 1)
    factors = factors.float()
    num_rows = max(1, PIECE_ELEMENTS // _PIECE_COLUMNS)
    for rows in matrices.b.split(num_rows):
        for columns, own in _column_pieces(rows, factors):
            columns.copy_(columns.float() * own)
            check_finite(columns, ExtraKind.MAGNITUDE)


def adapted_squares(matrices: Matrices, place: Place) -> Tensor:
    """fp64 `[out]`: the squared length of each row of W + sBA, over the inputs that are held."""
    base = place.base
    assert base is not None
    squares = base.row_norms[place.columns].cpu().double().square_()
    for a, b in zip(matrices.a.split(_PIECE_RANKS), matrices.b.split(_PIECE_RANKS), strict=True):
        products = _base_products(base, a)[:, place.columns]
        for part, own_squares, own_products in _column_pieces(b, squares, products):
            own_squares += 2 * (part.double() * own_products).sum(dim=0)
    gram = _gram(matrices.a)
    for part, own_squares in _column_pieces(matrices.b, squares):
        wide = part.double()
        own_squares += (wide * (gram @ wide)).sum(dim=0)
    return squares


def _base_products(base: BaseWeights, a: Tensor) -> Tensor:
    """fp32 `[rank, out]` on the host: the base's weight times rows of A."""
    device = base.row_norms.device
    if device.type == "cpu":
        return base.products(a)
    # On a separate stream: otherwise it would wait for the running step's work.
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        products = base.products(a.to(device)).cpu()
    return products


def _gram(a: Tensor) -> Tensor:
    """fp64 `[rank, rank]`: A Aᵀ, for A `[rank, in]`."""
    gram = torch.zeros(len(a), len(a), dtype=torch.float64)
    for columns in a.split(_PIECE_COLUMNS, dim=1):
        wide = columns.double()
        gram += wide @ wide.T
    return gram


def _column_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same columns of each tensor, a bounded number of them at a time."""
    return zip(*(tensor.split(_PIECE_COLUMNS, dim=-1) for tensor in tensors), strict=True)


def _check(extra: Extra, part: Slice, *, has_matrices: bool) -> None:
    """Raise ObjectCorrupt unless the extra has the shape that its kind has for this slice."""
    if extra.kind in _CHANGE_MATRICES and not has_matrices:
        raise ObjectCorrupt(f"{extra.kind} without A and B for {part.name}")
    is_embedding = part.kind is SliceKind.EMBEDDING
    allowed = _EMBEDDING_AUXILIARY if is_embedding else _LINEAR_AUXILIARY
    outer, inner = part.out_features, part.in_features
    if is_embedding:
        outer, inner = inner, outer
    num_rows = extra.shape[0] if abs(extra.shape[0] - outer) <= MAX_ADDED_TOKENS else outer
    shapes = {
        ExtraKind.MATRIX: (num_rows, inner),
        ExtraKind.TOKEN_ROWS: (len(extra.token_ids), inner),
        ExtraKind.CLASSIFICATION_HEAD: (min(extra.shape[0], MAX_LABELS), inner),
    }
    expected = shapes.get(extra.kind, (part.out_features,))
    if part.kind is SliceKind.EXPERTS or extra.kind not in allowed or extra.shape != expected:
        raise ObjectCorrupt(f"{extra.kind} {list(extra.shape)} does not fit {part.name}")
    most = outer + MAX_ADDED_TOKENS
    if extra.kind is ExtraKind.TOKEN_ROWS and not _are_ascending(extra.token_ids, below=most):
        raise ObjectCorrupt(
            f"the token ids for {part.name} are not ascending ids of its vocabulary"
        )


def _are_ascending(ids: tuple[int, ...], *, below: int) -> bool:
    if not ids or ids[0] < 0 or ids[-1] >= below:
        return False
    return all(first < second for first, second in pairwise(ids))


def check_finite(values: Tensor, kind: ExtraKind) -> None:
    """Raise AdapterUnavailable if a value is not finite."""
    low, high = torch.aminmax(values)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise AdapterUnavailable(
            f"the adapter's {kind} is not finite in {values.dtype} on this base model"
        )
