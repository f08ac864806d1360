"""A part of a quantized weight: some of its outputs and some of its inputs.

The part has the values of the whole weight. Where the inputs begin or end within a group, the part
has smaller groups with the same scale. Where they are a selection of a group's inputs, as with
GPTQ's act-order, each group is filled up with columns that stand for zero.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from .quantized_weight import QuantizedWeight

LEAST_GROUP = 16
"""Of smaller groups the scales would take more bytes than what fills up a larger one."""


def part_of(weight: QuantizedWeight, outputs: range, inputs: range) -> QuantizedWeight | None:
    """These outputs and inputs of the weight, in memory of their own. A scale of a whole row stays
    one of as many inputs as before.

    None: groups would have to be filled up, but no code stands for zero. For inputs in their own
    order, all equal parts of a weight are None or none is.
    """
    rows = weight.rows(outputs.start, outputs.stop)
    if len(inputs) == weight.num_inputs:
        return _copied(rows, slice(None))
    if weight.order is None and weight.group >= weight.shape[1]:
        return _copied(rows, slice(inputs.start, inputs.stop))
    return _regrouped(rows, inputs)


def _copied(rows: QuantizedWeight, columns: slice) -> QuantizedWeight:
    """The rows with all scales and some of the codes."""
    zero = None if rows.zero is None else rows.zero.clone()
    return replace(rows, codes=rows.codes[:, columns].clone(), scale=rows.scale.clone(), zero=zero)


def _regrouped(rows: QuantizedWeight, inputs: range) -> QuantizedWeight | None:
    """The columns of these inputs in groups of one size."""
    order = torch.arange(rows.shape[1]) if rows.order is None else rows.order
    held = ((order >= inputs.start) & (order < inputs.stop)).nonzero().flatten()
    counts = torch.bincount(held // rows.group, minlength=rows.scale.shape[1])
    size = gcd(rows.group, inputs.start, len(inputs), *counts.tolist())
    size = max(size, min(LEAST_GROUP, rows.group))
    filled = -(-counts // size) * size
    group_of = torch.arange(len(counts)).repeat_interleave(filled // size)
    places = torch.arange(len(held)) + (_starts(filled) - _starts(counts))[held // rows.group]
    columns = held[:1].repeat(int(filled.sum()))
    columns[places] = held
    codes = rows.codes[:, columns]
    if len(held) < len(columns):
        zeros = _codes_of_zero(rows)
        if zeros is None:
            return None
        is_filling = torch.ones(len(columns), dtype=torch.bool)
        is_filling[places] = False
        by_column = zeros[:, group_of.repeat_interleave(size)]
        codes = torch.where(is_filling, by_column, codes)
    own_order = order[columns] - inputs.start
    is_plain = torch.equal(own_order, torch.arange(len(columns)))
    return replace(
        rows,
        codes=codes,
        scale=rows.scale[:, group_of],
        group=size,
        zero=None if rows.zero is None else rows.zero[:, group_of],
        order=None if is_plain else own_order,
        num_filling=len(columns) - len(held),
    )


def _starts(sizes: Tensor) -> Tensor:
    """Where each of several ranges begins that lie behind one another."""
    return sizes.cumsum(0) - sizes


def _codes_of_zero(weight: QuantizedWeight) -> Tensor | None:
    """int8 `[out, groups]`: codes that stand for zero; None: there are none."""
    if weight.zero is not None:
        return weight.zero if weight.zero.dtype is torch.int8 else None
    code = 0
    if weight.table is not None:
        places = (weight.table == 0).nonzero()
        if not len(places):
            return None
        code = int(places[0])
    return torch.full(weight.scale.shape, code, dtype=torch.int8)
