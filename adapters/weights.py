"""Reads, checks and measures the values of an adapter's matrices, one at a time.

Numpy has no bfloat16, so bfloat16 is read as bits and widened. Memory is bounded by the largest
matrix, not by the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .block import NUMPY_DTYPES
from .errors import AdapterRejected
from .safetensors_header import TensorEntry

OVERFLOW_AT: Mapping[str, float] = {
    "float32": math.inf,
    "float16": 65520.0,
    "bfloat16": (2 - 2**-8) * 2.0**127,
}
"""Serving dtype to the smallest magnitude that rounds to infinity."""

_GRAM_CHUNK_ELEMENTS = 1 << 20

Array = npt.NDArray[Any]


def read_tensor(file: BinaryIO, tensor: TensorEntry) -> Array:
    """The tensor as stored, bfloat16 as `uint16` bits."""
    file.seek(tensor.offset)
    data = file.read(tensor.num_bytes)
    if len(data) != tensor.num_bytes:
        raise AdapterRejected("file_size_mismatch", "the file shrank while it was read")
    dtype = np.dtype(NUMPY_DTYPES[tensor.dtype]).newbyteorder("<")
    return np.frombuffer(data, dtype=dtype).reshape(tensor.shape)


def to_float32(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Widen stored values; exact."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """Narrow values that `to_float32` widened from this type; exact for them alone."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(NUMPY_DTYPES[dtype], copy=False)


def content_bytes(values: Array) -> memoryview:
    """The values in row order as flat bytes, without a copy if they are already contiguous."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def check_range(
    values: npt.NDArray[np.float32], name: str, *, scale: float, serving_dtype: str
) -> None:
    """Refuse values that are not finite, or not once scaled and rounded to the serving dtype.

    Raises AdapterRejected pointing to the tensor.
    """
    highest, lowest = float(values.max()), float(values.min())  # NaN if any value is
    peak = max(highest, -lowest)
    if not math.isfinite(peak) or math.isnan(lowest):
        raise AdapterRejected("non_finite_weights", f"{name} holds NaN or infinity", pointer=name)
    with np.errstate(over="ignore"):
        scaled = float(np.float32(peak) * np.float32(scale))
    if scaled >= OVERFLOW_AT[serving_dtype]:
        raise AdapterRejected(
            "weights_overflow",
            f"{name} reaches {peak * scale:.3g} with its scale, beyond {serving_dtype}",
            pointer=name,
        )


def delta_norm(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], scale: float) -> float:
    """Frobenius norm of scale·B·A for A `[rank, in]`, B `[out, rank]`, without forming B·A.

    ‖BA‖² is the sum over the elementwise product of BᵀB and AAᵀ, both `[rank, rank]`. In double
    precision no finite float32 matrices overflow it.
    """
    square = float(np.sum(_gram(b) * _gram(a.T)))
    return scale * math.sqrt(max(square, 0.0))


def _gram(tall: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """`tall.T @ tall` in double precision."""
    rank = tall.shape[1]
    total = np.zeros((rank, rank))
    for rows in _row_chunks(tall):
        wide = rows.astype(np.float64)
        total += wide.T @ wide
    return total


def _row_chunks(values: npt.NDArray[np.float32]) -> Iterator[npt.NDArray[np.float32]]:
    step = max(1, _GRAM_CHUNK_ELEMENTS // values.shape[1])
    for start in range(0, values.shape[0], step):
        yield values[start : start + step]
