"""A tensor in a safetensors file, of which slices are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DamagedBase

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn},
}
"""By safetensors' names."""
_LENGTH_BYTES = 8
"""Of the header's length, which is in front of it."""


class FileSlices:
    """Reads slices of a tensor into memory of their own, and no other bytes.

    safetensors 0.8 reads the whole tensor for each slice, or maps the file: pages that were read of
    a mapping stay until its end. Raises DamagedBase if the file cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        """path: a file that safetensors has opened before, so its header is valid."""
        self._path = path
        length_bytes = torch.empty(_LENGTH_BYTES, dtype=torch.uint8)
        self._read([(0, length_bytes)])
        length = int.from_bytes(length_bytes.numpy().tobytes(), "little")
        header_bytes = torch.empty(length, dtype=torch.uint8)
        self._read([(_LENGTH_BYTES, header_bytes)])
        header = json.loads(header_bytes.numpy().tobytes())[name]
        self.shape: tuple[int, ...] = tuple(header["shape"])
        self.dtype = DTYPES[header["dtype"]]
        self._first: int = _LENGTH_BYTES + length + header["data_offsets"][0]

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        """Adjacent rows, or of a matrix adjacent columns of adjacent rows."""
        rows, columns = index if isinstance(index, tuple) else (index, None)
        first, end, _ = rows.indices(self.shape[0])
        if columns is None:
            found = torch.empty(end - first, *self.shape[1:], dtype=self.dtype)
            self._read([(self._place(first), found)])
            return found
        left, right, _ = columns.indices(self.shape[1])
        found = torch.empty(end - first, right - left, dtype=self.dtype)
        self._read((self._place(row, left), found[row - first]) for row in range(first, end))
        return found

    def _place(self, row: int, column: int = 0) -> int:
        """Where this number is in the file, in bytes."""
        return self._first + (row * prod(self.shape[1:]) + column) * self.dtype.itemsize

    def _read(self, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Fill each tensor with what is from this byte of the file on."""
        try:
            with self._path.open("rb", buffering=0) as file:
                for offset, values in pieces:
                    content = values.view(torch.uint8).numpy().data
                    if os.preadv(file.fileno(), [content], offset) != values.nbytes:
                        raise DamagedBase(
                            f"{self._path} became shorter while it was read: download it again"
                        )
        except OSError as exc:
            raise DamagedBase(f"{self._path} cannot be read: {exc.strerror or exc}") from exc
