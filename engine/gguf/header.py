"""The header of a GGUF file: its metadata, and where each tensor lies. Imports no torch.

The file may come from anywhere. Every length and count in it is compared with the bytes that are
left before anything of that size is read, so a damaged file takes no more time or memory than a
whole one.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DamagedBase, ForeignBase, QuantizedBase
from .kinds import BLOCK_SIZES, KIND_NAMES, QUANTIZED_KINDS

GGUF_FILE = "loraplex.gguf"
"""The link to the file in the folder that its base is served from."""
NO_PACKAGE = "GGUF files need the package gguf, which is not installed: pip install gguf"
_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_LISTED = 4096
"""Longer arrays belong to the tokenizer."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
"""`struct` formats of the metadata's types of a fixed size."""
_LEAST_PAIR_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class Array(NamedTuple):
    """An array of the metadata."""

    values: tuple[Any, ...] | None
    """None: more than are ever needed here."""


class HeaderTensor(NamedTuple):
    """A tensor's entry."""

    kind: str
    shape: tuple[int, ...]
    """As in PyTorch: the last dimension is contiguous."""
    offset: int
    """From the beginning of the file."""
    num_bytes: int


class GgufHeader(NamedTuple):
    """Everything in the file but the tensors' values."""

    path: Path
    metadata: Mapping[str, Any]
    """int, float, bool, str or Array by key."""
    tensors: Mapping[str, HeaderTensor]
    """By the name in the file."""

    @property
    def architecture(self) -> str:
        name: str = self.metadata["general.architecture"]
        return name


def read_header(path: Path) -> GgufHeader:
    """The header of this file.

    Raises DamagedBase for a damaged file or a part of one, ForeignBase for a file that is no GGUF
    model, QuantizedBase if a tensor is of a kind that is not read.
    """
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_LFS_POINTER))
            if not beginning.startswith(_MAGIC):
                raise _not_gguf(path, beginning)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(path, mapped).header()
    except OSError as exc:
        raise DamagedBase(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _not_gguf(path: Path, beginning: bytes) -> DamagedBase | ForeignBase:
    if beginning == _LFS_POINTER:
        return DamagedBase(
            f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
        )
    return ForeignBase(f"{path} is not a GGUF file")


class _Reader:
    """Reads a file's header from its beginning to its end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.position = 0

    def header(self) -> GgufHeader:
        self.position = len(_MAGIC)
        self._check_version(self._number("I"))
        num_tensors, num_pairs = self._number("Q"), self._number("Q")
        self._check_count("metadata entries", num_pairs, _LEAST_PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"it has {key!r} twice")
            metadata[key] = self._value(self._number("I"))
        self._check_metadata(metadata)
        self._check_count("tensors", num_tensors, _LEAST_TENSOR_BYTES)
        entries: dict[str, HeaderTensor] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in entries:
                raise self._damaged(f"it has the tensor {name!r} twice")
            entries[name] = self._entry(name)
        tensors = self._placed(entries, metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT))
        return GgufHeader(self.path, metadata, tensors)

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if version.to_bytes(4, "little")[::-1][0] in _VERSIONS and version & 0xFFFF == 0:
            raise ForeignBase(f"{self.path} is a big-endian GGUF file: give a little-endian one")
        raise ForeignBase(
            f"{self.path} is GGUF version {version}; versions 2 and 3 are supported: convert the "
            "model again"
        )

    def _check_metadata(self, metadata: Mapping[str, Any]) -> None:
        if not isinstance(metadata.get("general.architecture"), str):
            raise self._damaged("it has no general.architecture")
        kind = metadata.get("general.type", "model")
        if kind != "model":
            raise ForeignBase(f"{self.path} holds a GGUF {kind}, not a model")
        parts = metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ForeignBase(
                f"{self.path} is one of {parts} parts of a model: join them with "
                "`llama-gguf-split --merge`"
            )
        alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
        if not is_power or alignment > _MAX_ALIGNMENT:
            raise self._damaged(f"its alignment is {alignment!r}")

    def _value(self, value_type: int) -> Any:
        if value_type in _SCALARS:
            return self._number(_SCALARS[value_type])
        if value_type == _STRING:
            return self._string()
        if value_type == _ARRAY:
            return self._array()
        raise self._damaged(f"its metadata has a value of the type {value_type}")

    def _array(self) -> Array:
        item_type, count = self._number("I"), self._number("Q")
        is_short = count <= _MAX_LISTED
        if item_type == _STRING:
            self._check_count("strings", count, 8)
            if is_short:
                return Array(tuple(self._string() for _ in range(count)))
            for _ in range(count):
                self._take(self._number("Q"))
            return Array(None)
        if item_type not in _SCALARS:
            raise self._damaged(f"its metadata has an array of the type {item_type}")
        item = struct.Struct("<" + _SCALARS[item_type])
        self._check_count("numbers", count, item.size)
        start = self._take(count * item.size)
        if not is_short:
            return Array(None)
        offsets = range(start, start + count * item.size, item.size)
        return Array(tuple(item.unpack_from(self.mapped, offset)[0] for offset in offsets))

    def _entry(self, name: str) -> HeaderTensor:
        """The offset is still relative to the first tensor."""
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"its tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = KIND_NAMES.get(number, f"with the number {number}")
        if kind not in BLOCK_SIZES:
            raise QuantizedBase(
                f"{self.path}: its tensor {name} is of the kind {kind}, which is not supported: "
                f"give a file with {', '.join(BLOCK_SIZES)}, or the original checkpoint"
            )
        values, num_bytes = BLOCK_SIZES[kind]
        if 0 in shape or shape[-1] % values:
            raise self._damaged(f"its tensor {name!r} of the kind {kind} is {list(shape)}")
        return HeaderTensor(kind, shape, offset, prod(shape) // values * num_bytes)

    def _placed(
        self, entries: Mapping[str, HeaderTensor], alignment: int
    ) -> dict[str, HeaderTensor]:
        """The tensors with offsets from the beginning of the file, in their order in it."""
        first = -(-self.position // alignment) * alignment
        placed = {}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda named: named[1].offset):
            if entry.offset % alignment or entry.offset < end:
                raise self._damaged(f"its tensor {name!r} is misplaced")
            end = entry.offset + entry.num_bytes
            if first + end > self.size:
                raise self._damaged(f"it ends before its tensor {name!r}")
            placed[name] = entry._replace(offset=first + entry.offset)
        return placed

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > self.size - self.position:
            raise self._damaged(f"it is too short for its {count} {what}")

    def _take(self, num_bytes: int) -> int:
        """The position before these bytes."""
        start = self.position
        if num_bytes > self.size - start:
            raise self._damaged("its header is longer than the file")
        self.position = start + num_bytes
        return start

    def _number(self, code: str) -> Any:
        number = struct.Struct("<" + code)
        return number.unpack_from(self.mapped, self._take(number.size))[0]

    def _string(self) -> str:
        length = self._number("Q")
        start = self._take(length)
        try:
            return self.mapped[start : start + length].decode()
        except UnicodeDecodeError as exc:
            raise self._damaged("its header has a string that is not UTF-8") from exc

    def _damaged(self, reason: str) -> DamagedBase:
        return DamagedBase(
            f"{self.path} is damaged or only a part of the file ({reason}): download it again"
        )


def quantized_kind(path: Path) -> str | None:
    """The kind of most quantized matrices, such as gguf-q4_k; None if there are none."""
    tensors = read_header(path).tensors.values()
    kinds = Counter(tensor.kind for tensor in tensors if tensor.kind in QUANTIZED_KINDS)
    return f"gguf-{kinds.most_common(1)[0][0].lower()}" if kinds else None
