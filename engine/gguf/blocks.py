"""The quantized blocks of GGUF files, unpacked to the common form of quantized weights.

A block holds 32 or 256 adjacent values of a row: their codes, and scales for groups of 16 or 32.
Numbers of several bytes are little-endian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.quantized_weight import CodeType, QuantizedWeight
from ..errors import QuantizedBase
from .kinds import QUANTIZED_KINDS

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DENSE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE_ROWS = 256
"""Unpacking takes several times the memory of the codes: only these rows do so at a time."""


class _Blocks(NamedTuple):
    """The contents of n blocks."""

    codes: Tensor
    """int8 `[n, values]`."""
    scale: Tensor
    """fp32 `[n, groups]`."""
    zero: Tensor | None = None
    """fp32 `[n, groups]`."""


class _Format(NamedTuple):
    code_type: CodeType
    group: int
    unpack: Callable[[Tensor], _Blocks]
    """From uint8 `[n, bytes]`."""


def unpack_blocks(data: Tensor, kind: str, in_features: int) -> QuantizedWeight:
    """The weight in these bytes: uint8 `[rows, bytes_per_row]`.

    Scales and zero points are fp32. Raises QuantizedBase for a kind that is not supported.
    """
    block_format = _FORMATS.get(kind)
    if block_format is None:
        raise QuantizedBase(unsupported_kind(kind))
    size = QUANTIZED_KINDS[kind]
    rows, bytes_per_row = data.shape
    assert in_features % size.values == 0, "whole blocks in each row"
    assert bytes_per_row == in_features // size.values * size.num_bytes
    codes = data.new_empty((rows, in_features), dtype=torch.int8)
    scale = data.new_empty((rows, in_features // block_format.group), dtype=torch.float32)
    zero = None
    for start in range(0, rows, _PIECE_ROWS):
        piece = slice(start, start + _PIECE_ROWS)
        blocks = block_format.unpack(data[piece].reshape(-1, size.num_bytes))
        codes[piece] = blocks.codes.reshape(-1, in_features)
        scale[piece] = blocks.scale.view(-1, scale.shape[1])
        if blocks.zero is not None:
            zero = torch.empty_like(scale) if zero is None else zero
            zero[piece] = blocks.zero.view(-1, scale.shape[1])
    table = None
    if block_format.code_type is CodeType.TABLE4:
        table = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=data.device)
    return QuantizedWeight(
        block_format.code_type, codes, scale, block_format.group, zero=zero, table=table
    )


def read_dense(data: Tensor, kind: str) -> Tensor:
    """The numbers in these bytes, uint8 `[..., bytes]`, in the dtype of the kind F32, F16 or BF16.

    Raises QuantizedBase for any other kind.
    """
    if kind not in _DENSE_DTYPES:
        raise QuantizedBase(unsupported_kind(kind))
    return data.contiguous().view(_DENSE_DTYPES[kind])


def unsupported_kind(kind: str) -> str:
    """The message for a kind that is not read."""
    return (
        f"GGUF tensors of the kind {kind} are not supported: give a file with "
        f"{', '.join(_FORMATS)}, or the original checkpoint"
    )


def _unpack_q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(_centered(_nibble_halves(blocks[:, 2:]), bits=4), _half(blocks, 0))


def _unpack_q4_1(blocks: Tensor) -> _Blocks:
    codes = _centered(_nibble_halves(blocks[:, 4:]), bits=4)
    return _with_minimum(codes, 8, _half(blocks, 0), _half(blocks, 2))


def _unpack_q5_0(blocks: Tensor) -> _Blocks:
    codes = _nibble_halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _Blocks(_centered(codes, bits=5), _half(blocks, 0))


def _unpack_q5_1(blocks: Tensor) -> _Blocks:
    codes = _nibble_halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _with_minimum(_centered(codes, bits=5), 16, _half(blocks, 0), _half(blocks, 2))


def _unpack_q8_0(blocks: Tensor) -> _Blocks:
    return _Blocks(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _unpack_q2_k(blocks: Tensor) -> _Blocks:
    packed, quants = blocks[:, :16], blocks[:, 16:80]
    scale, minimum = _half(blocks, 80) * (packed & 15), _half(blocks, 82) * (packed >> 4)
    codes = _centered(_planes(quants.view(-1, 2, 32), bits=2), bits=2)
    return _with_minimum(codes, 2, scale, -minimum)


def _unpack_q3_k(blocks: Tensor) -> _Blocks:
    high, quants, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low_scales = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    high_scales = _planes(packed[:, None, 8:], bits=2)
    scale = _half(blocks, 108) * ((low_scales | high_scales << 4).float() - 32)
    codes = _planes(quants.view(-1, 2, 32), bits=2) | _planes(high[:, None], bits=1) << 2
    return _Blocks(_centered(codes, bits=3), scale)


def _unpack_q4_k(blocks: Tensor) -> _Blocks:
    scale, minimum = _scales_and_minima(blocks)
    codes = _planes(blocks[:, 16:].view(-1, 4, 32), bits=4)
    return _with_minimum(_centered(codes, bits=4), 8, scale, -minimum)


def _unpack_q5_k(blocks: Tensor) -> _Blocks:
    scale, minimum = _scales_and_minima(blocks)
    high = _planes(blocks[:, None, 16:48], bits=1)
    codes = _planes(blocks[:, 48:].view(-1, 4, 32), bits=4) | high << 4
    return _with_minimum(_centered(codes, bits=5), 16, scale, -minimum)


def _unpack_q6_k(blocks: Tensor) -> _Blocks:
    low = _planes(blocks[:, :128].view(-1, 2, 64), bits=4)
    high = _planes(blocks[:, 128:192].view(-1, 2, 32), bits=2)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return _Blocks(_centered(low | high << 4, bits=6), scale)


def _unpack_iq4_nl(blocks: Tensor) -> _Blocks:
    return _Blocks(_nibble_halves(blocks[:, 2:]).view(torch.int8), _half(blocks, 0))


def _unpack_iq4_xs(blocks: Tensor) -> _Blocks:
    low_scales = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)
    high_scales = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    scale = (low_scales | high_scales.flatten(1) << 4).float() - 32
    codes = _nibble_halves(blocks[:, 8:].reshape(-1, 16)).view(-1, 256)
    return _Blocks(codes.view(torch.int8), _half(blocks, 0) * scale)


def _half(blocks: Tensor, start: int) -> Tensor:
    """fp32 `[n, 1]`: the fp16 number in each block from byte `start` on."""
    number = blocks[:, start : start + 2].clone(memory_format=torch.contiguous_format)
    return number.view(torch.float16).float()


def _nibble_halves(packed: Tensor) -> Tensor:
    """`[n, 2 × bytes]`: all low halves of the bytes, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _planes(packed: Tensor, *, bits: int) -> Tensor:
    """uint8 `[n, runs × 8 / bits × length]` of `[n, runs, length]`.

    Each run of bytes gives first the lowest bits of all its bytes, then the next ones.
    """
    shifts = range(0, 8, bits)
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in shifts], dim=2).flatten(1)


def _bits(packed: Tensor) -> Tensor:
    """uint8 `[n, 8 × bytes]`: each bit, the lowest of a byte first."""
    return torch.stack([packed >> shift & 1 for shift in range(8)], dim=2).flatten(1)


def _centered(codes: Tensor, *, bits: int) -> Tensor:
    """int8 codes around 0 of codes that begin with 0."""
    return codes.view(torch.int8) - (1 << bits - 1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 `[n, 8]` each, of Q4_K and Q5_K: 6 bits for each group, in 12 bytes.

    The first four groups have the low bits of bytes 0 to 3 and 4 to 7. The others have the halves
    of bytes 8 to 11, and the high bits of the former bytes above them.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _with_minimum(codes: Tensor, center: int, scale: Tensor, minimum: Tensor) -> _Blocks:
    """Blocks of weights `(codes + center) × scale + minimum`.

    A group with the scale 0 consists of its minimum. No zero point gives that, so its codes are 0,
    and its scale is the minimum.
    """
    is_flat = scale == 0
    zero = -center - minimum / scale
    zero = torch.where(is_flat, -1.0, zero)
    group = codes.shape[1] // scale.shape[1]
    codes = codes.masked_fill(is_flat.repeat_interleave(group, dim=1), 0)
    return _Blocks(codes, torch.where(is_flat, minimum, scale), zero)


_FORMATS = {
    "Q4_0": _Format(CodeType.INT4, 32, _unpack_q4_0),
    "Q4_1": _Format(CodeType.INT4, 32, _unpack_q4_1),
    "Q5_0": _Format(CodeType.INT8, 32, _unpack_q5_0),
    "Q5_1": _Format(CodeType.INT8, 32, _unpack_q5_1),
    "Q8_0": _Format(CodeType.INT8, 32, _unpack_q8_0),
    "Q2_K": _Format(CodeType.INT4, 16, _unpack_q2_k),
    "Q3_K": _Format(CodeType.INT4, 16, _unpack_q3_k),
    "Q4_K": _Format(CodeType.INT4, 32, _unpack_q4_k),
    "Q5_K": _Format(CodeType.INT8, 32, _unpack_q5_k),
    "Q6_K": _Format(CodeType.INT8, 16, _unpack_q6_k),
    "IQ4_NL": _Format(CodeType.TABLE4, 32, _unpack_iq4_nl),
    "IQ4_XS": _Format(CodeType.TABLE4, 32, _unpack_iq4_xs),
}
