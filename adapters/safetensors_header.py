"""Checks the header of an untrusted safetensors file before its content is used.

The check is stricter than the format: the library accepts duplicate keys, hostile names, zero-size
tensors with astronomic dimensions and headers of 100 MB. An accepted header tiles the file exactly:
every byte after the header belongs to exactly one tensor, according to its shape and element type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from .errors import AdapterRejected
from .strict_json import DuplicateKey, MalformedJson, parse_json_object, shown

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
"""As many as A and B of gate, up and down of 58 layers with 256 experts, and some more."""
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 3
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}

NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_METADATA = "__metadata__"
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file."""

    name: str
    dtype: str
    """`F32`, `F16` or `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_safetensors_header(file: BinaryIO, file_bytes: int) -> dict[str, TensorEntry]:
    """Read the header of a file of `file_bytes` bytes; return its tensors in file order.

    Raises AdapterRejected with the first fault found, pointing to the tensor.
    """
    header = _read_header_bytes(file, file_bytes)
    payload_offset = _LENGTH_BYTES + len(header)
    entries = _parse_entries(header, payload_offset)
    _check_tiling(entries, payload_offset, file_bytes)
    return {entry.name: entry for entry in entries}


def _read_header_bytes(file: BinaryIO, file_bytes: int) -> bytes:
    prefix = file.read(_LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES:
        raise AdapterRejected("not_safetensors", "the file is shorter than 8 bytes")
    if length > MAX_HEADER_BYTES:
        raise _too_long(prefix, length, file_bytes)
    header = file.read(length)
    if len(header) < length:
        raise AdapterRejected("file_size_mismatch", "the file ends within its header")
    if not header.startswith(b"{"):
        raise AdapterRejected("not_safetensors", "the header is not a JSON object")
    return header


def _too_long(prefix: bytes, length: int, file_bytes: int) -> AdapterRejected:
    # Read as a length, the first bytes of every zip archive (torch.save) and of practically every
    # pickle exceed the limit, so no valid file is mistaken for one.
    if prefix.startswith(b"PK\x03\x04") or (prefix[0] == 0x80 and prefix[1] in range(2, 6)):
        return AdapterRejected("pickle_refused", "the weights are a pickle or a zip archive")
    if length > file_bytes:
        return AdapterRejected("not_safetensors", "the file has no safetensors header")
    return AdapterRejected(
        "header_too_large", f"the header has {length} bytes; the most is {MAX_HEADER_BYTES}"
    )


def _parse_entries(header: bytes, payload_offset: int) -> list[TensorEntry]:
    try:
        fields = parse_json_object(header)
    except DuplicateKey as exc:
        raise AdapterRejected("duplicate_key", f"in the header, {exc}") from exc
    except MalformedJson as exc:
        raise AdapterRejected("malformed_header", f"the header is malformed: {exc}") from exc
    _check_metadata(fields.pop(_METADATA, {}))
    if len(fields) > MAX_TENSORS:
        raise AdapterRejected("too_many_tensors", f"the file holds {len(fields)} tensors")
    if not fields:
        raise AdapterRejected("no_tensors", "the file holds no tensors")
    return [_parse_entry(name, entry, payload_offset) for name, entry in fields.items()]


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise AdapterRejected(
            "malformed_header", "the metadata is not a map of texts", pointer=_METADATA
        )


def _parse_entry(name: str, entry: object, payload_offset: int) -> TensorEntry:
    if not name or len(name) > MAX_NAME_BYTES or not NAME_CHARACTERS.issuperset(name):
        raise AdapterRejected(
            "invalid_tensor_name", f"the tensor name {shown(name)} is not allowed"
        )
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_FIELDS:
        raise AdapterRejected("malformed_header", f"the entry of {name} is malformed", pointer=name)
    dtype = _parse_dtype(name, entry["dtype"])
    shape = _parse_shape(name, entry["shape"])
    begin, end = _parse_offsets(name, entry["data_offsets"])
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise AdapterRejected(
            "invalid_offsets", f"the bytes of {name} do not fit its shape", pointer=name
        )
    return TensorEntry(name, dtype, shape, payload_offset + begin, end - begin)


def _parse_dtype(name: str, dtype: object) -> str:
    if not isinstance(dtype, str):
        raise AdapterRejected("malformed_header", f"{name} has no element type", pointer=name)
    if dtype not in ITEM_BYTES:
        raise AdapterRejected(
            "unsupported_dtype",
            f"{name} is {shown(dtype)}; F32, F16 and BF16 are served",
            pointer=name,
        )
    return dtype


def _parse_shape(name: str, shape: object) -> tuple[int, ...]:
    sizes = _natural_numbers(shape)
    if sizes is None:
        raise AdapterRejected("malformed_header", f"{name} has a malformed shape", pointer=name)
    if len(sizes) > MAX_DIMENSIONS or 0 in sizes:
        raise AdapterRejected(
            "invalid_shape", f"{name} has no elements or more than 3 dimensions", pointer=name
        )
    return sizes


def _parse_offsets(name: str, offsets: object) -> tuple[int, int]:
    numbers = _natural_numbers(offsets)
    if numbers is None or len(numbers) != 2:
        raise AdapterRejected("malformed_header", f"{name} has malformed offsets", pointer=name)
    return numbers[0], numbers[1]


def _natural_numbers(value: object) -> tuple[int, ...] | None:
    """The list as numbers, or None if it holds anything but integers of at least 0."""
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        return None
    return tuple(value)


def _check_tiling(entries: list[TensorEntry], payload_offset: int, file_bytes: int) -> None:
    """Sort by offset; check that the tensors fill the file without hole or overlap."""
    entries.sort(key=lambda entry: entry.offset)
    expected = payload_offset
    for entry in entries:
        if entry.offset != expected:
            raise AdapterRejected(
                "invalid_offsets",
                f"{entry.name} overlaps or leaves a gap to the tensor before it",
                pointer=entry.name,
            )
        expected += entry.num_bytes
    if expected != file_bytes:
        raise AdapterRejected(
            "file_size_mismatch", f"the header accounts for {expected} bytes of {file_bytes}"
        )
