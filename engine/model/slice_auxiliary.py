"""Applies an adapter's auxiliary tensors to one slice's result, in the adapter's rows.

It uses the served values that `block_preparation` produced. The rows are a range known to the host,
so nothing waits for the device. Each change affects these rows only, so overflow in one adapter's
values stays in its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...adapters.arena import Arena, RowAuxiliary
from ...adapters.block import REPLACING_KINDS, VECTOR_KINDS, Extra, ExtraKind, PlacedExtra
from ...adapters.resized_ends import num_added_rows
from ...kernels.lora_vectors import change_rows


@dataclass(frozen=True, slots=True, eq=False)
class SliceAuxiliary:
    """One adapter's auxiliary tensors for one slice, on the device."""

    values: Mapping[ExtraKind, Tensor]
    """Views of the arena, each in its extra's shape."""
    token_ids: Tensor | None
    """int64 `[tokens]`, ascending: which rows TOKEN_ROWS replaces."""
    replacing: Extra | None = None
    """The one of `REPLACING_KINDS`."""

    def num_added(self, vocab_size: int) -> int:
        """How many rows of an end are those of tokens that the base does not have."""
        return 0 if self.replacing is None else num_added_rows(self.replacing, vocab_size)

    @classmethod
    def of(cls, placed: tuple[PlacedExtra, ...], flat: Tensor) -> SliceAuxiliary:
        """An adapter holds at most one extra of each kind for a slice."""
        values, token_ids, replacing = {}, None, None
        for offset, extra in ((part.offset, part.extra) for part in placed):
            values[extra.kind] = flat[offset : offset + extra.num_elements].view(extra.shape)
            if extra.kind in REPLACING_KINDS:
                replacing = extra
            if extra.kind is ExtraKind.TOKEN_ROWS:
                is_cuda = flat.device.type == "cuda"
                host = torch.tensor(extra.token_ids, dtype=torch.int64, pin_memory=is_cuda)
                token_ids = host.to(flat.device, non_blocking=True)
        return cls(values, token_ids, replacing)


class HeldAuxiliary:
    """The extras of the adapters that ran, by slice of one projection: found once for each."""

    def __init__(self, arena: Arena, slice_range: range) -> None:
        self._arena = arena
        self._slices = slice_range
        self._rows: dict[int, tuple[RowAuxiliary, list[tuple[int, SliceAuxiliary]]]] = {}

    def of_row(self, row: int) -> list[tuple[int, SliceAuxiliary]]:
        """A row's auxiliary tensors, with the number of their slice in the projection."""
        source = self._arena.row_auxiliary[row]
        found = self._rows.get(row)
        if found is None or found[0] is not source:  # the row belongs to another adapter now
            held = [
                (index, SliceAuxiliary.of(source[slice_index], self._arena.flat))
                for index, slice_index in enumerate(self._slices)
                if slice_index in source
            ]
            found = self._rows[row] = (source, held)
        return found[1]

    def forget(self, row: int) -> None:
        """Drop cached data of a table row's adapter."""
        self._rows.pop(row, None)


def change_linear(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    auxiliary: SliceAuxiliary,
    *,
    with_vectors: bool = True,
) -> None:
    """Change a linear slice's base result y in place, before its LoRA delta is added.

    x `[n, in]`, y `[n, out]`: rows of one adapter. bias `[out]`: the base's, in any type.
    with_vectors: False if `apply_vectors` applies the adapter's vectors afterwards.
    """
    values = auxiliary.values
    bias = None if bias is None else bias.to(y.dtype)
    if (matrix := values.get(ExtraKind.MATRIX)) is not None:
        known = matrix[: y.shape[1]]
        y[:, : len(known)] = F.linear(x, known, None if bias is None else bias[: len(known)])
    if (rows := values.get(ExtraKind.TOKEN_ROWS)) is not None:
        assert auxiliary.token_ids is not None
        token_ids = auxiliary.token_ids[: len(rows) - auxiliary.num_added(y.shape[1])]
        own = F.linear(x, rows[: len(token_ids)], None if bias is None else bias[token_ids])
        y.index_copy_(1, token_ids, own)
    if with_vectors:
        change_rows(y, bias, *map(values.get, VECTOR_KINDS))


def added_logits(x: Tensor, vocab_size: int, auxiliary: SliceAuxiliary) -> Tensor | None:
    """The logits `[n, num_added]` of the tokens that an adapter adds to the base's `vocab_size`.

    x `[n, in]`: rows of the adapter. None: it adds none.
    """
    num_added = auxiliary.num_added(vocab_size)
    if not num_added:
        return None
    (rows,) = (values for kind, values in auxiliary.values.items() if kind in REPLACING_KINDS)
    return F.linear(x, rows[-num_added:])


def change_embedding(token_ids: Tensor, y: Tensor, scale: float, auxiliary: SliceAuxiliary) -> None:
    """Change an embedding's base result y in place, before its LoRA delta is added.

    token_ids `[n]`, y `[n, out]`: rows of one adapter. scale: the factor of the base's rows.
    """
    values = auxiliary.values
    if (matrix := values.get(ExtraKind.MATRIX)) is not None:
        y.copy_(F.embedding(token_ids.clamp(max=len(matrix) - 1), matrix) * scale)
    if (rows := values.get(ExtraKind.TOKEN_ROWS)) is not None:
        assert auxiliary.token_ids is not None
        place = torch.searchsorted(auxiliary.token_ids, token_ids).clamp_(max=len(rows) - 1)
        is_replaced = auxiliary.token_ids[place] == token_ids
        y.copy_(torch.where(is_replaced[:, None], rows[place] * scale, y))
    if (factor := values.get(ExtraKind.MAGNITUDE)) is not None:
        y.addcmul_(y, factor)
