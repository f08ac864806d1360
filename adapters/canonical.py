"""Writing an adapter's canonical block from its original tensors, matrix by matrix."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from .binding import BoundSlice
from .block import NUMPY_DTYPES, BlockPlan, write_block_header
from .layout import BaseLayout
from .safetensors_header import TensorEntry
from .weights import Array, content_bytes, read_tensor, to_float32


class WrittenBlock(NamedTuple):
    """A finished block file."""

    sha256: str
    """Hex digest of the whole file."""
    size_bytes: int


def block_dtype(bound: Sequence[BoundSlice]) -> str:
    """The element type all tensors share, else F32, which holds each of them exactly."""
    dtypes = {tensor.dtype for part in bound for tensor in (part.a, part.b)}
    return dtypes.pop() if len(dtypes) == 1 else "F32"


def write_block(
    path: Path, *, weights: BinaryIO, bound: Sequence[BoundSlice], layout: BaseLayout, digest: str
) -> WrittenBlock:
    """Write the canonical block to the new file `path`; the payload holds the original values."""
    dtype = block_dtype(bound)
    plan = BlockPlan(layout, {part.index: part.rank for part in bound})
    header = io.BytesIO()
    payload_offset = write_block_header(
        header,
        base_id=layout.base_id,
        digest=digest,
        dtype=dtype,
        scales={part.index: part.scale for part in bound},
        plan=plan,
    )
    itemsize = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    with path.open("xb") as file:
        output = _HashedOutput(file)
        output.write(header.getbuffer())
        for offset, tensor, is_b in _matrices_by_offset(bound, plan):
            values = _converted(read_tensor(weights, tensor), tensor.dtype, dtype)
            output.pad_to(payload_offset + offset * itemsize)
            output.write(content_bytes(values.T if is_b else values))
        output.pad_to(payload_offset + plan.num_elements * itemsize)
    return WrittenBlock(output.hexdigest(), output.position)


def _matrices_by_offset(
    bound: Sequence[BoundSlice], plan: BlockPlan
) -> list[tuple[int, TensorEntry, bool]]:
    """(element offset, tensor, whether it is a B) in the order of the file."""
    matrices = [
        (int(plan.table[part.index, column]), tensor, column == 1)
        for part in bound
        for column, tensor in enumerate((part.a, part.b))
    ]
    return sorted(matrices, key=lambda matrix: matrix[0])


def _converted(values: Array, dtype: str, target: str) -> Array:
    return values if dtype == target else to_float32(values, dtype)


class _HashedOutput:
    """A file written once from front to back, hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.position = 0
        self._file = file
        self._hasher = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hasher.update(data)
        self.position += len(data)

    def pad_to(self, position: int) -> None:
        self.write(bytes(position - self.position))

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()
