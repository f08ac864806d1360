"""A paged cache with sequences for attention tests; unwritten memory is NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.kernels.attention import AttentionBatch, AttentionOptions, attend_gathered
from loraplex.kernels.kv_pages import (
    KeyPrefix,
    KvPages,
    PlainPages,
    QuantizedPages,
    make_pages,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    is_latent: bool = False
    """The values are the first elements of the keys."""


@dataclass(frozen=True)
class Sequences:
    """`(context, new tokens)` of each, the context with them; a tree is of the last new tokens."""

    lengths: Sequence[tuple[int, int]]
    trees: Sequence[Sequence[int] | None] = ()

    def chunks(self, block_size: int) -> list[SequenceChunk]:
        rng = random.Random(0)
        num_blocks = [-(-context // block_size) for context, _ in self.lengths]
        ids = rng.sample(range(1, 1 + sum(num_blocks)), sum(num_blocks))
        trees = [*self.trees, *[None] * (len(self.lengths) - len(self.trees))]
        return [
            SequenceChunk(
                [0] * count,
                context - count,
                [block_table([ids.pop() for _ in range(blocks)])],
                tree=tree,
            )
            for (context, count), blocks, tree in zip(self.lengths, num_blocks, trees, strict=True)
        ]


class AttentionCase:
    """The same step laid out for the plain op and for one that reads blocks in place."""

    def __init__(
        self,
        sequences: Sequences,
        options: AttentionOptions | None = None,
        sizes: Sizes | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        code_dtype: torch.dtype | None = None,
    ) -> None:
        self.sizes = sizes or Sizes()
        self.magnitude = 1.0
        """Of the answers, about."""
        self.options = options or AttentionOptions(scale=self.sizes.dim**-0.5)
        size = self.sizes.block_size
        self.chunks = sequences.chunks(size)
        window, sinks = self.options.sliding_window, self.options.num_sink_positions
        num_blocks = 1 + sum(len(chunk.tables[0]) for chunk in self.chunks)
        self._groups = [KvGroup((0,), window, sinks, num_blocks)]
        dims = (self.sizes.dim, self.sizes.value_dim)
        self.keys, self.values = (
            make_pages(
                (num_blocks, size, self.sizes.kv_heads, dim),
                dtype=dtype,
                code_dtype=code_dtype,
                device=CPU,
            )
            for dim in dims
        )
        if self.sizes.is_latent:
            self.values = KeyPrefix(self.keys, self.sizes.value_dim)
        slots = torch.cat([self._slots(chunk) for chunk in self.chunks])
        for pages, dim in zip((self.keys, self.values), dims, strict=True):
            pages.write(slots, torch.randn(len(slots), self.sizes.kv_heads, dim).to(dtype))
            if not isinstance(pages, KeyPrefix):
                _poison(pages, slots)
        num_tokens = sum(len(chunk.token_ids) for chunk in self.chunks)
        self.q = torch.randn(num_tokens, self.sizes.heads, self.sizes.dim).to(dtype)

    def pages_on(self, device: torch.device) -> tuple[KvPages, KvPages]:
        keys = _moved(self.keys, device, self.q.dtype)
        if self.sizes.is_latent:
            return keys, KeyPrefix(keys, self.sizes.value_dim)
        return keys, _moved(self.values, device, self.q.dtype)

    def batch(self, *, in_place: bool, device: torch.device = CPU) -> AttentionBatch:
        inputs = make_inputs(
            self.chunks,
            groups=self._groups,
            block_size=self.sizes.block_size,
            device=device,
            in_place=in_place,
        )
        return inputs.attention[0]

    def dominate(self, *, size: float, others: float) -> None:
        """Let each sequence's first key take almost all weight: its value is of this size, those of
        the other keys are of size `others`."""
        self.magnitude, dtype = size, self.q.dtype
        self.q = (0.5 + torch.rand(self.q.shape)).to(dtype)
        for chunk in self.chunks:
            keys = 0.3 * torch.randn(chunk.end, self.sizes.kv_heads, self.sizes.dim)
            values = others * torch.randn(chunk.end, self.sizes.kv_heads, self.sizes.value_dim)
            keys[0], values[0] = 3.0, size * torch.randn(values[0].shape)
            self.keys.write(self._slots(chunk), keys.to(dtype))
            self.values.write(self._slots(chunk), values.to(dtype))

    def _slots(self, chunk: SequenceChunk) -> Tensor:
        places, size = torch.arange(chunk.end), self.sizes.block_size
        return torch.tensor(chunk.tables[0].tolist())[places // size] * size + places % size

    def expected(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """By the plain op in this dtype, which needs what nobody wrote to be zeros."""
        keys = _readable(self.keys, dtype)
        values: KvPages = KeyPrefix(keys, self.sizes.value_dim)
        if not self.sizes.is_latent:
            values = _readable(self.values, dtype)
        batch = self.batch(in_place=False)
        return attend_gathered(self.q.to(dtype), keys, values, batch, self.options)


def _moved(pages: KvPages, device: torch.device, dtype: torch.dtype) -> KvPages:
    if pages.scales is None:
        return PlainPages(pages.data.to(device))
    data, scales = pages.data.to(device), pages.scales.to(device)
    return QuantizedPages(data, scales, dtype=dtype)


def _poison(pages: KvPages, written: Tensor) -> None:
    """NaN wherever nothing was written, the null block included."""
    data = pages.data if pages.scales is None else pages.scales
    flat = data.view(-1, *data.shape[2:])
    kept = flat[written]
    flat.fill_(torch.nan)
    flat[written] = kept


def _readable(pages: KvPages, dtype: torch.dtype) -> KvPages:
    if pages.scales is None:
        return PlainPages(pages.data.to(dtype).nan_to_num(0.0))
    return QuantizedPages(pages.data, pages.scales.nan_to_num(0.0), dtype=dtype)
