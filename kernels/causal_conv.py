"""Causal convolutions of each channel over the rows of several sequences, which go on from states.

Each state is the last inputs of its sequence, one fewer than the convolution is wide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ConvIndex(NamedTuple):
    """Where a convolution of one width finds its inputs: rows of all states below one another, then
    those of `x`."""

    inputs: Tensor
    """int64 `[num_rows, width]`: the inputs of each row, its own last."""
    left: Tensor
    """int64 `[num_sequences, width - 1]`: the last inputs of each sequence after the step."""


def conv_index(begins: Tensor, counts: Tensor, width: int) -> ConvIndex:
    """begins, counts: int64 `[num_sequences]` in host memory, the first row and the rows of each;
    the rows of all are adjacent and in order."""
    num_states = len(counts) * (width - 1)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
    within = torch.arange(len(sequence)) - begins[sequence]
    back = torch.arange(1 - width, 1)
    inputs = _places(sequence[:, None], within[:, None] + back, begins, width, num_states)
    rows = torch.arange(len(counts))[:, None]
    left = _places(rows, counts[:, None] + back[:-1], begins, width, num_states)
    return ConvIndex(inputs, left)


def _places(
    sequence: Tensor, within: Tensor, begins: Tensor, width: int, num_states: int
) -> Tensor:
    """The places of the tokens `within` of a sequence's rows; negative ones are before them."""
    in_states = sequence * (width - 1) + width - 1 + within
    in_rows = num_states + begins[sequence] + within
    return torch.where(within < 0, in_states, in_rows)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, index: ConvIndex
) -> tuple[Tensor, Tensor]:
    """`x [num_rows, channels]`, `weight [channels, width]`, `states [num_sequences, channels, width
    - 1]` in the dtype of x; returns the outputs in the weight's dtype, and the new states."""
    before = states.transpose(1, 2).reshape(-1, x.shape[1])
    values = torch.cat([before, x])
    left = values[index.left].transpose(1, 2)
    values = values.to(weight.dtype)
    out = torch.zeros_like(x, dtype=weight.dtype) if bias is None else bias.expand_as(x).clone()
    for place, column in enumerate(index.inputs.unbind(1)):
        out.addcmul_(values[column], weight[:, place])
    return out, left
