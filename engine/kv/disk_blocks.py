"""KV blocks as bytes for the disk: the parts of one block from all tensors of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...adapters.identity import AdapterKey
from ..transfers import HostCopy
from .host_blocks import HostBlocks
from .layout import EraseOnDisk, FromDisk, ToDisk
from .prefix_cache import Prefix

Bytes = npt.NDArray[np.uint8]
Put = Callable[[int, bytes], None]
"""Takes a piece of a block and its offset."""


class BlockStore(Protocol):
    """Works in a thread of its own; see `DiskStore`."""

    def write(
        self, group: int, slot: int, prefix: Prefix, content: Callable[[], memoryview]
    ) -> None:
        """Begin to write a block. `content` is called in the store's thread."""

    def read(self, group: int, slot: int, prefix: Prefix, host_slot: int, put: Put) -> None:
        """Begin to read a block. `put` is called in the store's thread."""

    def erase(self, adapter: AdapterKey) -> None:
        """Begin to make an adapter's prefixes unreadable."""


class DiskBlocks:
    """Hands blocks to the store, and puts what it reads into host slots."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def execute(
        self,
        operation: ToDisk | FromDisk | EraseOnDisk,
        device: Sequence[Sequence[Tensor]],
        host: Sequence[HostBlocks],
    ) -> None:
        """Begin an operation. `device`, `host`: per group; `device` has `[layers, num_blocks, ...]`
        each. All earlier copies to the host are in its slots."""
        match operation:
            case ToDisk(group, source, is_on_host, disk_slot, prefix):
                if is_on_host:
                    parts = host[group].parts(source)
                else:
                    parts = [tensor[:, source] for tensor in device[group]]
                copies = list(map(_copy, parts))
                self._store.write(group, disk_slot, prefix, lambda: _joined(copies))
            case FromDisk(group, disk_slot, host_slot, prefix):
                put = _put_into(host[group].parts(host_slot))
                self._store.read(group, disk_slot, prefix, host_slot, put)
            case EraseOnDisk(adapter):
                self._store.erase(adapter)
            case _:
                assert_never(operation)


def _copy(part: Tensor) -> HostCopy:
    return HostCopy(part.contiguous() if part.is_cuda else part)


def _joined(copies: Sequence[HostCopy]) -> memoryview:
    """The bytes of these copies, one after another."""
    return np.concatenate([_as_bytes(copy.read()) for copy in copies]).data


def _put_into(parts: Sequence[Tensor]) -> Put:
    """Takes the bytes of a block, and writes them into the parts of a host slot."""
    rows = [row for part in parts for row in part]  # each contiguous
    ends = np.cumsum([row.nbytes for row in rows]).tolist()

    def put(offset: int, piece: bytes) -> None:
        left = memoryview(piece)
        for row, end in zip(rows, ends, strict=True):
            if end <= offset:
                continue
            start = offset - (end - row.nbytes)
            count = min(len(left), end - offset)
            _as_bytes(row)[start : start + count] = np.frombuffer(left[:count], dtype=np.uint8)
            left, offset = left[count:], offset + count
            if not left:
                return

    return put


def _as_bytes(tensor: Tensor) -> Bytes:
    """The memory of a contiguous tensor on the host."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()
