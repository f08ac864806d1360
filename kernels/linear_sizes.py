"""Bytes of linear layers, computed from the shapes of their weights without packing them."""

from __future__ import annotations

import torch
from torch import Tensor

from .linear_packing import LinearKind, packed_dtype
from .quantized_weight import QuantizedWeight
from .wna16_weight import pack_codes

_PANEL = 16
"""PANEL of `cpu/linear.h`."""
_INT8_BYTES_PER_OUTPUT = 4 + 8
"""`OneDnnInt8Linear` has an fp32 scale and an int64 zero point for each output."""


def linear_bytes(
    weight: Tensor | QuantizedWeight, kind: LinearKind, *, dtype: torch.dtype, device_type: str
) -> int:
    """`Linear.weight_bytes` of this weight as `choose_linear` chose it, to be multiplied in dtype.

    weight: on the meta device or any other; its values are not read. An fp32 weight for
    `PanelLinear` counts as fp32, although it takes half if bf16 holds its values.
    """
    if isinstance(weight, Tensor):
        return _exact_bytes(weight, kind, dtype, device_type)
    match kind:
        case LinearKind.ONEDNN_INT8:
            return weight.codes.numel() + len(weight.codes) * _INT8_BYTES_PER_OUTPUT
        case LinearKind.INT8_PANEL:
            out_features, in_features = weight.shape
            return _in_panels(out_features) * (in_features + -in_features % 4 + 4)
        case LinearKind.QUANTIZED_PANEL:
            return _quantized_panel_bytes(weight)
        case LinearKind.DEQUANTIZED:
            return weight.codes.numel() + _by_group_bytes(weight) + _shared_bytes(weight)
        case LinearKind.WNA16:
            order = 0 if weight.order is None else weight.order.nbytes
            return pack_codes(weight).num_bytes + order
        case _:
            return weight.codes.numel() * dtype.itemsize


def _exact_bytes(weight: Tensor, kind: LinearKind, dtype: torch.dtype, device_type: str) -> int:
    out_features, in_features = weight.shape
    if kind is LinearKind.BFLOAT16_PANEL:
        return _in_panels(out_features) * (in_features + in_features % 2) * dtype.itemsize
    if kind is not LinearKind.PANEL:
        return weight.numel() * dtype.itemsize
    stored = packed_dtype(weight.dtype, dtype=dtype, device_type=device_type)
    return _in_panels(out_features) * in_features * stored.itemsize


def _quantized_panel_bytes(weight: QuantizedWeight) -> int:
    out_features, in_features = weight.shape
    row_bytes = 2 * -(-in_features * weight.code_type.bits // 16)
    by_group = _by_group_bytes(weight) // out_features
    return _in_panels(out_features) * (row_bytes + by_group) + _shared_bytes(weight)


def _in_panels(num_rows: int) -> int:
    return -(-num_rows // _PANEL) * _PANEL


def _by_group_bytes(weight: QuantizedWeight) -> int:
    return weight.scale.nbytes + (0 if weight.zero is None else weight.zero.nbytes)


def _shared_bytes(weight: QuantizedWeight) -> int:
    return sum(tensor.nbytes for tensor in (weight.table, weight.order) if tensor is not None)
