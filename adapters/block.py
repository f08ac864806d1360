"""The canonical block: one adapter as one array, alike on disk, in memory and on the device.

Element offsets do not depend on the element type, so a block is loaded by a plain copy into an
extent of the arena. For each projection that the adapter changes, the block holds the A matrices
`[rank, in]` of the slices, stacked so that one shrink serves them all, then each slice's B
**transposed**, `[rank, out]` (see `SliceKind` for embeddings and experts). The auxiliary tensors
follow. Each adapter has its own ranks, and layers that it does not change take no space.

File: magic (8 bytes), header length (8 bytes, little endian), JSON header, zero padding to 64
bytes, payload. The payload holds the tenant's original values. The header stores the scale from
alpha, which is folded into B when the block is read for serving.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .errors import ObjectCorrupt
from .layout import BaseLayout

MAGIC = b"LPXBLK02"
PAYLOAD_ALIGNMENT_BYTES = 64
ALIGNMENT_ELEMENTS = 32
"""Every matrix starts on a multiple of this: 64 bytes in bf16, wide enough for vector loads."""
MAX_HEADER_BYTES = 8 << 20

NUMPY_DTYPES: Mapping[str, npt.DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # numpy has no bfloat16: its bits
}


class ExtraKind(StrEnum):
    """The kinds of auxiliary tensors of a slice.

    The file holds the tenant's original values; the engine converts them to served values at load
    (`engine/model/block_preparation.py`).
    """

    MAGNITUDE = "magnitude"
    """DoRA's `[out]`. Served: the factor of each output row, less 1."""
    LORA_BIAS = "lora_bias"
    """`[out]`, the bias of lora_B. Served: times the scale."""
    BIAS = "bias"
    """`[out]`, in place of the base's bias. Served: the difference to the base's."""
    MATRIX = "matrix"
    """`[out, in]` (an embedding's: `[in, out]`), in place of the base's whole matrix."""
    TOKEN_ROWS = "token_rows"
    """`[tokens, out]`, in place of an embedding's rows of `token_ids`; of a tied output head's
    too, where the slice is that head: `[tokens, in]`."""
    CLASSIFICATION_HEAD = "classification_head"
    """`[labels, in]`, beside the output head, whose input it has too."""
    DRAFT_HEAD = "draft_head"
    """`[values]`: a head for speculation, beside the output head; see `draft_head`."""


VECTOR_KINDS = (ExtraKind.MAGNITUDE, ExtraKind.BIAS, ExtraKind.LORA_BIAS)
"""The kinds with one value per output, in the order in which they change a linear layer's result.
"""
REPLACING_KINDS = (ExtraKind.MATRIX, ExtraKind.TOKEN_ROWS)
"""The kinds that take the place of the base's matrix, or of rows of it. A slice has one at most."""


@dataclass(frozen=True)
class Extra:
    """One auxiliary tensor of a slice."""

    slice_index: int
    kind: ExtraKind
    shape: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    """For TOKEN_ROWS: the row numbers, ascending."""
    head_id: str = ""
    """For DRAFT_HEAD: what it reads; see `draft_head`."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class PlacedExtra:
    """An extra and where it begins, in elements."""

    extra: Extra
    offset: int

    def moved(self, distance: int) -> PlacedExtra:
        """The same, `distance` elements further on."""
        return PlacedExtra(self.extra, self.offset + distance)


@dataclass(frozen=True)
class BlockPlan:
    """The position of each array of an adapter, given the rank of each slice that it changes."""

    layout: BaseLayout
    ranks: Mapping[int, int]
    """Slice index to rank; slices without A and B are absent."""
    auxiliary: tuple[Extra, ...] = ()
    vocab_size: int | None = None
    """The tokens of the adapter; None: as many as the base has."""

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """`int64 [num_slices, 3]`: a_offset, b_offset, rank, in elements from the block's start.

        The A matrices of one projection are adjacent, so its first touched slice's `a_offset`
        and the sum of its ranks describe them all.
        """
        return self._plan[0]

    @cached_property
    def num_elements(self) -> int:
        return self._plan[2]

    @cached_property
    def placed_auxiliary(self) -> tuple[PlacedExtra, ...]:
        """The extras in their order, with offsets from the block's start."""
        return self._plan[1]

    @cached_property
    def _plan(self) -> tuple[npt.NDArray[np.int64], tuple[PlacedExtra, ...], int]:
        table = np.zeros((len(self.layout.slices), 3), dtype=np.int64)
        offset = 0
        for projection, indices in self.layout.projection_ranges():
            touched = [index for index in indices if self.ranks.get(index, 0)]
            for index in touched:
                table[index, 0] = offset
                table[index, 2] = self.ranks[index]
                offset += self._num_rows(index) * projection.in_features
            offset = _align(offset, ALIGNMENT_ELEMENTS)
            for index in touched:
                table[index, 1] = offset
                offset += self._num_rows(index) * self.layout.slices[index].out_features
                offset = _align(offset, ALIGNMENT_ELEMENTS)
        placed = []
        for extra in self.auxiliary:
            placed.append(PlacedExtra(extra, offset))
            offset = _align(offset + extra.num_elements, ALIGNMENT_ELEMENTS)
        return table, tuple(placed), offset

    def _num_rows(self, index: int) -> int:
        return self.ranks[index] * self.layout.slices[index].num_experts


@dataclass(frozen=True)
class BlockHeader:
    """The header of a block's file."""

    base_id: str
    digest: str
    dtype: str
    """`F32`, `F16` or `BF16`: the element type of the payload."""
    ranks: Mapping[int, int]
    """Slice index to rank."""
    scales: Mapping[int, float]
    """Slice index to alpha ÷ rank (÷ √rank for rsLoRA)."""
    row_scales: Mapping[int, tuple[tuple[int, float], ...]]
    """Slice index of experts whose factors differ to `BoundSlice.row_scales`."""
    auxiliary: tuple[Extra, ...]
    source: Mapping[str, Any]
    """The data for restoring the owner's files; see `export`. Empty if unknown."""
    num_elements: int
    payload_offset: int
    """Bytes from the start of the file to the payload."""


def write_block_header(
    file: BinaryIO,
    *,
    base_id: str,
    digest: str,
    dtype: str,
    scales: Mapping[int, float],
    plan: BlockPlan,
    row_scales: Mapping[int, tuple[tuple[int, float], ...]] | None = None,
    source: Mapping[str, Any] | None = None,
) -> int:
    """Write everything before the payload; return the payload's offset in bytes."""
    fields = {
        "base_id": base_id,
        "digest": digest,
        "dtype": dtype,
        "slices": [[index, rank, scales[index]] for index, rank in sorted(plan.ranks.items())],
        "extras": [
            [
                *(extra.slice_index, extra.kind, list(extra.shape), list(extra.token_ids)),
                *([extra.head_id] if extra.head_id else []),
            ]
            for extra in plan.auxiliary
        ],
        "source": source or {},
        "num_elements": plan.num_elements,
        **({"row_scales": list(row_scales.items())} if row_scales else {}),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    payload_offset = _align(len(MAGIC) + 8 + len(header), PAYLOAD_ALIGNMENT_BYTES)
    file.write(MAGIC + len(header).to_bytes(8, "little") + header)
    file.write(bytes(payload_offset - len(MAGIC) - 8 - len(header)))
    return payload_offset


def read_block_header(path: Path) -> BlockHeader:
    """Read a block's header and check that the file has the size it names.

    Raises ObjectCorrupt if this is not a block or it is truncated.
    """
    with path.open("rb", buffering=0) as file:  # not one byte of the payload is read
        magic, length = file.read(8), int.from_bytes(file.read(8), "little")
        if magic != MAGIC or length > MAX_HEADER_BYTES:
            raise ObjectCorrupt(f"{path.name} is not an adapter block")
        try:
            fields = json.loads(file.read(length))
            slices = [(int(i), int(rank), float(scale)) for i, rank, scale in fields["slices"]]
            header = BlockHeader(
                base_id=fields["base_id"],
                digest=fields["digest"],
                dtype=fields["dtype"],
                ranks={index: rank for index, rank, _ in slices},
                scales={index: scale for index, _, scale in slices},
                row_scales={
                    int(index): tuple((int(num_rows), float(scale)) for num_rows, scale in runs)
                    for index, runs in fields.get("row_scales", ())
                },
                auxiliary=tuple(_extra(*entry) for entry in fields["extras"]),
                source=fields["source"],
                num_elements=int(fields["num_elements"]),
                payload_offset=_align(16 + length, PAYLOAD_ALIGNMENT_BYTES),
            )
            itemsize = np.dtype(NUMPY_DTYPES[header.dtype]).itemsize
        except (ValueError, KeyError, TypeError) as exc:
            raise ObjectCorrupt(f"{path.name} has a malformed header") from exc
    if path.stat().st_size != header.payload_offset + header.num_elements * itemsize:
        raise ObjectCorrupt(f"{path.name} is truncated")
    return header


def _extra(
    slice_index: int, kind: str, shape: list[int], token_ids: list[int], head_id: str = ""
) -> Extra:
    sizes = tuple(map(int, shape))
    return Extra(int(slice_index), ExtraKind(kind), sizes, tuple(token_ids), str(head_id))


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
