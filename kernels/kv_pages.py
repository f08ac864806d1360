"""Pages of one layer's keys or values: storage, writing and gathering.

A page is a block of `block_size` tokens. On the CPU, attention uses the result of `gather`, in the
model's own dtype. The Triton kernels read and write `data` and `scales` directly.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
"""The range of fp32 in two bytes. Codes are taken under the rounded scale, so that its short
mantissa costs nothing but a quarter of a step at the very largest element."""


class GatherBuffer:
    """Memory for gathered blocks that is used again and again.

    The system zeroes every page of fresh memory. For decode attention that takes longer than
    copying the blocks.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor on the buffer's only device. It is valid until the next call with
        this dtype."""
        num_elements = math.prod(size)
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < num_elements:
            memory = self._memory[dtype] = torch.empty(num_elements, dtype=dtype, device=device)
        return memory[:num_elements].view(size)


Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns zeros of this size. What a block has of them is dense; the blocks need not be adjacent.
"""


class KvPages(Protocol):
    """`[num_blocks, block_size, num_heads, dim]` in some form."""

    num_heads: int
    dim: int
    block_size: int
    data: Tensor
    """The stored values in their own dtype: vectors, or codes."""
    scales: Tensor | None
    """`[num_blocks, block_size, num_heads, 1]`: the scales of codes; None: `data` is not
    quantized."""
    tensors: tuple[Tensor, ...]
    """All tensors of its own, blocks first. A block of zeros reads as zeros."""

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """Store `vectors [num_tokens, num_heads, dim]` at slots: block id x block size + offset."""
        ...

    def gather(self, block_ids: Tensor, buffer: GatherBuffer | None = None) -> Tensor:
        """`[*block_ids.shape, block_size, num_heads, dim]`; non-finite values stay non-finite.

        With a buffer, the result lies in it and is valid until its next use.
        """
        ...


class PlainPages:
    """Vectors as the model computed them."""

    def __init__(self, data: Tensor) -> None:
        _, self.block_size, self.num_heads, self.dim = data.shape
        self.data = data
        self.scales: Tensor | None = None
        self.tensors: tuple[Tensor, ...] = (data,)

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        if self.data.is_contiguous():
            self.data.flatten(0, 1).index_copy_(0, slots, vectors)
        else:
            _put_apart(self.data, slots, vectors)

    def gather(self, block_ids: Tensor, buffer: GatherBuffer | None = None) -> Tensor:
        blocks = _select(self.data, block_ids, buffer or GatherBuffer())
        return blocks.view(*block_ids.shape, *blocks.shape[1:])


class QuantizedPages:
    """One byte per element and one scale per token and head, symmetric around zero.

    The error of an element is at most half a step: 1/254 of the largest element of its token and
    head with int8 codes; 1/16 of the element itself with e4m3 codes.
    """

    def __init__(self, quantized: Tensor, scales: Tensor, *, dtype: torch.dtype) -> None:
        """`quantized` int8 or e4m3, `scales` with the same shape and a last axis of 1; `dtype`: the
        dtype of gathered values."""
        _, self.block_size, self.num_heads, self.dim = quantized.shape
        self._dtype, self._code_dtype = dtype, quantized.dtype
        is_integer = quantized.dtype is torch.int8
        self._largest = (torch.iinfo if is_integer else torch.finfo)(quantized.dtype).max
        # As plain bytes, because not every device can index float8 tensors.
        self._quantized, self._scales = quantized.view(torch.uint8), scales
        self.data = quantized
        self.scales: Tensor | None = scales
        self.tensors: tuple[Tensor, ...] = (self._quantized, scales)

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        vectors = vectors.float()
        # A non-finite scale makes the whole vector non-finite, so that NaN rows are detected.
        scales = (vectors.abs().amax(-1, keepdim=True) / self._largest).to(SCALE_DTYPE)
        steps = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        quantized = (vectors / steps).clamp(-self._largest, self._largest)
        if self._code_dtype is torch.int8:
            quantized = quantized.round()
        quantized = quantized.to(self._code_dtype).view(torch.uint8)
        if self.data.is_contiguous():
            self._quantized.flatten(0, 1).index_copy_(0, slots, quantized)
            self._scales.flatten(0, 1).index_copy_(0, slots, scales)
        else:
            _put_apart(self._quantized, slots, quantized)
            _put_apart(self._scales, slots, scales)

    def gather(self, block_ids: Tensor, buffer: GatherBuffer | None = None) -> Tensor:
        buffer = buffer or GatherBuffer()
        codes = _select(self._quantized, block_ids, buffer).view(self._code_dtype)
        blocks = buffer.take(tuple(codes.shape), self._dtype, codes.device).copy_(codes)
        blocks *= self._scales.index_select(0, block_ids.flatten())
        return blocks.view(*block_ids.shape, *blocks.shape[1:])


class KeyPrefix:
    """Values that are the first elements of each key: a view of the keys' pages, without memory of
    its own."""

    def __init__(self, keys: KvPages, dim: int) -> None:
        self.keys, self.dim = keys, dim
        self.block_size, self.num_heads = keys.block_size, keys.num_heads
        self.data = keys.data[..., :dim]
        self.scales = keys.scales
        self.tensors: tuple[Tensor, ...] = ()

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """Does nothing: the values are stored with the keys."""

    def gather(self, block_ids: Tensor, buffer: GatherBuffer | None = None) -> Tensor:
        return self.keys.gather(block_ids, buffer)[..., : self.dim]


def _put_apart(blocks: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store `rows [num_tokens, ...]` at slots of `blocks [num_blocks, block_size, ...]`, which need
    not be adjacent."""
    block_ids = slots // blocks.shape[1]
    blocks[block_ids, slots - block_ids * blocks.shape[1]] = rows


def _select(blocks: Tensor, block_ids: Tensor, buffer: GatherBuffer) -> Tensor:
    """These blocks, one after another, in the buffer."""
    ids = block_ids.flatten()
    out = buffer.take((len(ids), *blocks.shape[1:]), blocks.dtype, blocks.device)
    return torch.index_select(blocks, 0, ids, out=out)


class PageStack(NamedTuple):
    """Pages of several layers in the same memory, so that one call changes a block in all."""

    pages: list[KvPages]
    tensors: tuple[Tensor, ...]
    """`[len(pages), num_blocks, ...]`: those of the pages."""


def stack_pages(
    count: int,
    size: tuple[int, int, int, int],
    *,
    dtype: torch.dtype,
    code_dtype: torch.dtype | None,
    device: torch.device,
    allocate: Allocate | None = None,
) -> PageStack:
    """`count` pages of zeros, `size` as in KvPages; `code_dtype` None: plain. `allocate`: where
    they are; None: in memory of their own, which they take on the CPU once they are written to."""
    allocate = allocate or partial(allocate_zeros, device=device)
    if code_dtype is None:
        data = allocate((count, *size), dtype)
        return PageStack([PlainPages(each) for each in data], (data,))
    quantized = allocate((count, *size), torch.uint8)
    scales = allocate((count, *size[:3], 1), SCALE_DTYPE)
    pages: list[KvPages] = [
        QuantizedPages(each.view(code_dtype), own, dtype=dtype)
        for each, own in zip(quantized, scales, strict=True)
    ]
    return PageStack(pages, (quantized, scales))


def make_pages(
    size: tuple[int, int, int, int],
    *,
    dtype: torch.dtype,
    code_dtype: torch.dtype | None,
    device: torch.device,
) -> KvPages:
    """The pages of one layer, see `stack_pages`."""
    return stack_pages(1, size, dtype=dtype, code_dtype=code_dtype, device=device).pages[0]


def allocate_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # From calloc, which touches no page of a large cache, where torch would fill all. They begin
    # with a page, so that blocks of whole pages can be given back as a whole.
    num_bytes = math.prod(size) * dtype.itemsize
    untouched = np.zeros(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -untouched.ctypes.data % mmap.PAGESIZE
    return torch.from_numpy(untouched[start : start + num_bytes]).view(dtype).view(size)


def write_pages(keys: KvPages, values: KvPages, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Store a step's `k, v [num_tokens, num_heads, dim]`, last axes dense; see `KvPages.write`.

    v None: `values` are a KeyPrefix. On CUDA a token whose slot is negative is skipped.
    """
    assert (v is None) == isinstance(values, KeyPrefix)
    if k.is_cuda:
        from . import kv_write_triton  # Triton is not installed everywhere

        kv_write_triton.write_pages(keys, values, slots, k, v)
    else:
        keys.write(slots, k)
        if v is not None:
            values.write(slots, v)


def block_strides(keys: KvPages, values: KvPages) -> dict[str, int]:
    """The elements from one block to the next, as constants of kernels that read `data` and
    `scales`."""
    return {
        "KEY_STRIDE": keys.data.stride(0),
        "VALUE_STRIDE": values.data.stride(0),
        "KEY_SCALE_STRIDE": 0 if keys.scales is None else keys.scales.stride(0),
        "VALUE_SCALE_STRIDE": 0 if values.scales is None else values.scales.stride(0),
    }


def vector_bytes(dim: int, *, dtype: torch.dtype, code_dtype: torch.dtype | None) -> int:
    """Bytes that one token's vector takes in one head."""
    if code_dtype is None:
        return dim * dtype.itemsize
    return dim * code_dtype.itemsize + SCALE_DTYPE.itemsize
