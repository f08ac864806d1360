"""Restores an adapter's two original files from its block.

Names, element types, shapes and bytes of every tensor are the original ones, and so are the
configuration fields that affect the output. Examining the restored files gives the same digest.

A server calls `run_export`, which uses a child process, so the bytes do not remain in the server's
memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .block import NUMPY_DTYPES, BlockHeader, read_block_header
from .child import PYTHON, child_environment
from .confinement import ProcessLimits, die_first, leave_network, limit_resources
from .errors import ObjectCorrupt
from .safetensors_header import ITEM_BYTES
from .source import SourceTensor, parse_source
from .weights import Array, content_bytes, from_float32, to_float32

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_HEADER_ALIGNMENT_BYTES = 8
_RESERVE_BYTES = 1 << 30
_MEMORY_FACTOR = 16
"""In the worst case one matrix is the whole block, held in several dtypes and orders at once."""
_OUTPUT_FACTOR = 4
_CPU_SECONDS = 600
_NO_FILE_STATUS = 3
_CORRUPT_STATUS = 4


def run_export(block: Path, directory: Path, *, base_model_name: str | None = None) -> None:
    """`export_adapter` in a child process.

    Raises FileNotFoundError if there is no block, ObjectCorrupt, or OSError if the child fails.
    """
    child = subprocess.run(
        [*PYTHON, "-m", __name__],
        input=json.dumps([str(block), str(directory), base_model_name]).encode(),
        stderr=subprocess.PIPE,
        env=child_environment(),
    )
    match child.returncode:
        case 0:
            return
        case status if status == _NO_FILE_STATUS:
            raise FileNotFoundError(block)
        case status if status == _CORRUPT_STATUS:
            raise ObjectCorrupt(child.stderr.decode(errors="replace"))
    raise OSError(f"the exporting process ended with status {child.returncode}: {child.stderr!r}")


def export_adapter(block: Path, directory: Path, *, base_model_name: str | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` into the existing `directory`.

    `base_model_name` is the trainer's name of the base, which the block does not store. Existing
    files of these names are replaced, the weights first, so an existing configuration means a
    complete adapter. Raises ObjectCorrupt if the block is damaged or lacks its source information.
    """
    header = read_block_header(block)
    source = parse_source(header.source)
    tensors = sorted(source.tensors, key=lambda tensor: tensor.name)
    with _replacing(directory / WEIGHTS_NAME) as output:
        output.write(_safetensors_header(tensors))
        payload = np.memmap(
            block, NUMPY_DTYPES[header.dtype], "r", header.payload_offset, (header.num_elements,)
        )
        for tensor in tensors:
            output.write(content_bytes(_read(payload, header, tensor)))
    with _replacing(directory / CONFIG_NAME) as output:
        config = {**source.config, "base_model_name_or_path": base_model_name}
        output.write(json.dumps(config, indent=2).encode())


def _read(payload: Array, header: BlockHeader, tensor: SourceTensor) -> Array:
    """One tensor in its original form."""
    stored = payload[tensor.offset : tensor.offset + tensor.num_elements]
    if len(stored) != tensor.num_elements:
        raise ObjectCorrupt("the block does not hold all tensors that it names")
    values = tensor.arrangement.undo(stored, tensor.shape)
    if tensor.dtype == header.dtype:
        return values
    return from_float32(to_float32(values, header.dtype), tensor.dtype)


def _safetensors_header(tensors: Iterable[SourceTensor]) -> bytes:
    """The length and the JSON of a safetensors file that holds these tensors in this order."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + int(np.prod(tensor.shape)) * ITEM_BYTES[tensor.dtype]
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    encoded = json.dumps(fields, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT_BYTES)
    return len(encoded).to_bytes(8, "little") + encoded


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    """Run in the child: read the request from standard input, without network and with limits."""
    block, directory, base_model_name = json.load(sys.stdin)
    try:
        _confine(Path(block).stat().st_size)
        export_adapter(Path(block), Path(directory), base_model_name=base_model_name)
    except FileNotFoundError:
        sys.exit(_NO_FILE_STATUS)
    except ObjectCorrupt as exc:
        sys.stderr.write(str(exc))
        sys.exit(_CORRUPT_STATUS)


def _confine(block_bytes: int) -> None:
    die_first()
    leave_network()
    limit_resources(
        ProcessLimits(
            memory_bytes=_RESERVE_BYTES + _MEMORY_FACTOR * block_bytes,
            cpu_seconds=_CPU_SECONDS,
            file_bytes=_RESERVE_BYTES + _OUTPUT_FACTOR * block_bytes,
        )
    )


if __name__ == "__main__":
    main()
