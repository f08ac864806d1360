"""A matrix whose rows are read when something is computed with them.

The input embedding and the output head may be most of a base. Until a rank has cut its part, they
stay in their files: the checks before need the rows of a few tokens, and the head's products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..checkpoint.stored_weights import RowReader, Values, dense, identity, row_reader
from .weight_rows import in_pieces, join_pieces


class RowMatrix(Tensor):
    """`[out, in]`, dense for whoever uses it; it holds no values.

    Lookups of rows, products with it as a linear layer's weight and slices of rows read no more
    than they need, or a few rows at a time. Any other function gets the whole matrix.
    """

    _read: RowReader

    @staticmethod
    def of(
        read: RowReader, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> RowMatrix:
        """read: the rows, also quantized or in another dtype."""
        matrix: RowMatrix = Tensor._make_wrapper_subclass(
            RowMatrix, shape, dtype=dtype, device=device
        )
        matrix._read = read
        return matrix

    def of_rows(self, rows: range) -> RowMatrix:
        """These adjacent rows, which are not read yet."""
        read, first = self._read, rows.start

        def read_part(part: range) -> Values:
            return read(range(first + part.start, first + part.stop))

        return RowMatrix.of(read_part, (len(rows), self.shape[1]), self.dtype, self.device)

    @property
    def form(self) -> Values:
        """One row as it is read: all are of its form."""
        return self._read(range(1))

    def stored(self, change: Callable[[Values], Values]) -> Values:
        """All rows as they are read, in memory of their own. `change`: of a few rows."""
        num_rows, in_features = self.shape
        pieces = in_pieces(range(num_rows), in_features)
        return join_pieces(
            change(self.form), num_rows, (change(self._read(piece)) for piece in pieces)
        )

    def dense_rows(self, rows: range) -> Tensor:
        """These adjacent rows, in memory of their own."""
        found = torch.empty(len(rows), self.shape[1], dtype=self.dtype, device=self.device)
        for piece in in_pieces(rows, self.shape[1]):
            own = slice(piece.start - rows.start, piece.stop - rows.start)
            found[own] = self._dense(piece)
        return found

    def whole(self) -> Tensor:
        """All rows, in memory of their own."""
        return self.dense_rows(range(self.shape[0]))

    def looked_up(self, indices: Tensor) -> Tensor:
        """The rows of these indices, int64 `[...]`: `[..., in]`."""
        rows, places = indices.unique(return_inverse=True)
        found = [self._dense(range(row, row + 1)) for row in rows.tolist()]
        return torch.cat(found)[places]

    def products(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [..., in] @ matrix.T + bias`, as `torch.nn.functional.linear`."""
        num_rows, in_features = self.shape
        y = x.new_empty(*x.shape[:-1], num_rows)
        for piece in in_pieces(range(num_rows), in_features):
            own = slice(piece.start, piece.stop)
            y[..., own] = F.linear(x, self._dense(piece), None if bias is None else bias[own])
        return y

    def _dense(self, rows: range) -> Tensor:
        return dense(self._read(rows), dtype=self.dtype, device=self.device)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        match func, args:
            case F.embedding, [Tensor() as indices, RowMatrix() as matrix, *_]:
                return matrix.looked_up(indices)
            case F.linear, [Tensor() as x, RowMatrix() as matrix, *bias]:
                return matrix.products(x, bias[0] if bias else (kwargs or {}).get("bias"))
            case Tensor.detach, [RowMatrix() as matrix]:
                return matrix.of_rows(range(matrix.shape[0]))
            case Tensor.__getitem__, [RowMatrix() as matrix, slice() as rows]:
                return matrix.dense_rows(range(matrix.shape[0])[rows])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without its class
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(RowMatrix, RowMatrix.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def leave_as_rows(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Let the modules compute with the rows that `row_reader` reads, where their weights are on the
    meta device. Those that share a weight share its matrix."""
    matrices: dict[object, nn.Parameter] = {}
    for module in modules:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if weight.is_meta:
            shared = identity(weight)
            if shared not in matrices:
                matrix = RowMatrix.of(row_reader(module), weight.shape, weight.dtype, device)
                matrices[shared] = nn.Parameter(matrix, requires_grad=False)
            module.weight = matrices[shared]


def read_whole(modules: Iterable[nn.Module]) -> None:
    """Read the weights that are such matrices. Modules that shared one share what is read."""
    tensors: dict[Tensor, nn.Parameter] = {}
    for module in modules:
        weight = getattr(module, "weight", None)  # packed layers have none
        if isinstance(weight, RowMatrix):
            if weight not in tensors:
                tensors[weight] = nn.Parameter(weight.whole(), requires_grad=False)
            module.weight = tensors[weight]
