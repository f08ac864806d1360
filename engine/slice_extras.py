"""What adapters hold beside A and B, added to one slice's result in the rows of one adapter.

Served values are those that `block_preparation` left. The rows are a range that the host knows, so
nothing waits for the device; each change touches these rows only, so whatever one adapter's values
overflow to stays in its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters.block import ExtraKind, PlacedExtra


class TokenRows:
    """The device's copies of the token ids whose rows adapters replace, by table row."""

    def __init__(self) -> None:
        self._token_ids: dict[int, Tensor] = {}

    def token_ids(self, row: int, placed: PlacedExtra, device: torch.device) -> Tensor:
        """int64 `[tokens]`, ascending, of the extra that this table row's adapter holds."""
        found = self._token_ids.get(row)
        if found is None:
            is_cuda = device.type == "cuda"
            host = torch.tensor(placed.extra.token_ids, dtype=torch.int64, pin_memory=is_cuda)
            found = self._token_ids[row] = host.to(device, non_blocking=True)
        return found

    def forget(self, row: int) -> None:
        """Drop what was kept for this table row's adapter."""
        self._token_ids.pop(row, None)


def by_kind(extras: tuple[PlacedExtra, ...]) -> Mapping[ExtraKind, PlacedExtra]:
    """The extras of one slice; an adapter holds at most one of each kind for it."""
    return {placed.extra.kind: placed for placed in extras}


def values(flat: Tensor, placed: PlacedExtra) -> Tensor:
    """A view of an extra's values, in its shape."""
    extra = placed.extra
    return flat[placed.offset : placed.offset + extra.num_elements].view(extra.shape)


def change_linear(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    extras: Mapping[ExtraKind, Tensor],
    token_ids: Tensor | None,
) -> None:
    """Change a linear slice's base result y in place, before its LoRA delta is added.

    x `[n, in]`, y `[n, out]`: rows of one adapter. bias `[out]`: the base's. token_ids: which
    rows of the weight TOKEN_ROWS replaces.
    """
    if (matrix := extras.get(ExtraKind.MATRIX)) is not None:
        y.copy_(F.linear(x, matrix, None if bias is None else bias.to(x.dtype)))
    if (rows := extras.get(ExtraKind.TOKEN_ROWS)) is not None:
        assert token_ids is not None
        own = x @ rows.T
        y.index_copy_(1, token_ids, own if bias is None else own + bias[token_ids].to(x.dtype))
    if (factor := extras.get(ExtraKind.MAGNITUDE)) is not None:
        # PEFT scales the product and not the bias.
        y.addcmul_(y if bias is None else y - bias.to(y.dtype), factor)
    for kind in (ExtraKind.BIAS, ExtraKind.LORA_BIAS):
        if (added := extras.get(kind)) is not None:
            y += added


def change_embedding(
    token_ids: Tensor,
    y: Tensor,
    scale: float,
    extras: Mapping[ExtraKind, Tensor],
    replaced_ids: Tensor | None,
) -> None:
    """Change an embedding's base result y in place, before its LoRA delta is added.

    token_ids `[n]`, y `[n, out]`: rows of one adapter. scale: what the base multiplies its rows by.
    replaced_ids: which rows of the table TOKEN_ROWS replaces, ascending.
    """
    if (matrix := extras.get(ExtraKind.MATRIX)) is not None:
        y.copy_(F.embedding(token_ids, matrix) * scale)
    if (rows := extras.get(ExtraKind.TOKEN_ROWS)) is not None:
        assert replaced_ids is not None
        place = torch.searchsorted(replaced_ids, token_ids).clamp_(max=len(rows) - 1)
        is_replaced = replaced_ids[place] == token_ids
        y.copy_(torch.where(is_replaced[:, None], rows[place] * scale, y))
    if (factor := extras.get(ExtraKind.MAGNITUDE)) is not None:
        y.addcmul_(y, factor)
