"""Writes an adapter's canonical block from its original tensors, one matrix at a time."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from .arrangement import Arrangement, Order, PlacedTensor, compose
from .block import MAX_HEADER_BYTES, NUMPY_DTYPES, BlockPlan, write_block_header
from .bound import Binding, BoundExtra
from .errors import AdapterRejected
from .layout import BaseLayout
from .peft_config import PeftConfig
from .source import describe_source
from .weights import Array, content_bytes, read_tensor, to_float32


class WrittenBlock(NamedTuple):
    """A finished block file."""

    sha256: str
    """Hex digest of the whole file."""
    size_bytes: int


def block_dtype(binding: Binding) -> str:
    """The element type all tensors share, else F32, which holds each of them exactly."""
    dtypes = {tensor.dtype for tensor in binding.tensors}
    return dtypes.pop() if len(dtypes) == 1 else "F32"


def write_block(
    path: Path,
    *,
    weights: BinaryIO,
    binding: Binding,
    config: PeftConfig,
    layout: BaseLayout,
    digest: str,
) -> WrittenBlock:
    """Write the canonical block to the file `path`; the payload holds the original values.

    Raises AdapterRejected if its header grows beyond what readers accept.
    """
    dtype = block_dtype(binding)
    plan = BlockPlan(
        layout,
        {part.index: part.rank for part in binding.slices},
        tuple(part.extra for part in binding.auxiliary),
    )
    placed = _place(binding, plan)
    header = io.BytesIO()
    payload_offset = write_block_header(
        header,
        base_id=layout.base_id,
        digest=digest,
        dtype=dtype,
        scales={part.index: part.scale for part in binding.slices},
        row_scales={part.index: part.row_scales for part in binding.slices if part.row_scales},
        plan=plan,
        source=describe_source(binding, config, placed),
    )
    if payload_offset > MAX_HEADER_BYTES:
        raise AdapterRejected(
            "too_many_tensors",
            f"the names and places of {len(placed)} tensors take {payload_offset} bytes",
        )
    itemsize = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    with path.open("wb") as file:
        output = _HashedOutput(file)
        output.write(header.getbuffer())
        for offset, parts in groupby(placed, key=lambda entry: entry.offset):
            output.pad_to(payload_offset + offset * itemsize)
            output.write(content_bytes(_arranged(weights, list(parts), dtype)))
        output.pad_to(payload_offset + plan.num_elements * itemsize)
    return WrittenBlock(output.hexdigest(), output.position)


def _place(binding: Binding, plan: BlockPlan) -> list[PlacedTensor]:
    """Every tensor and its position, in the order of the file."""
    placed = []
    for part in binding.slices:
        a_offset, b_offset, _ = plan.table[part.index].tolist()
        placed += [PlacedTensor(a_offset, *matrix[:2]) for matrix in part.a]
        placed += [PlacedTensor(b_offset, *matrix[:2]) for matrix in part.b]
    for extra, where in zip(binding.auxiliary, plan.placed_auxiliary, strict=True):
        arrangement = _arrangement_of_extra(extra)
        placed.append(PlacedTensor(where.offset, extra.tensor, arrangement, extra.is_derived))
    return sorted(placed, key=lambda entry: entry.offset)


def _arranged(weights: BinaryIO, parts: Sequence[PlacedTensor], dtype: str) -> Array:
    """The matrix at one position of the block, of one tensor or composed of several."""
    tensors = ((part, _converted(read_tensor(weights, part.tensor), part, dtype)) for part in parts)
    return compose((part.arrangement, values) for part, values in tensors)


def _arrangement_of_extra(extra: BoundExtra) -> Arrangement:
    return Arrangement(Order.ROWS, rows=extra.rows) if extra.rows else Arrangement(Order.AS_STORED)


def _converted(values: Array, part: PlacedTensor, target: str) -> Array:
    dtype = part.tensor.dtype
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
