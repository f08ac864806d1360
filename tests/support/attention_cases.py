"""A paged cache with sequences for attention tests; unwritten memory is NaN."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.execution.decode_inputs import DecodeInputs, DecodeLayout
from loraplex.engine.kv.block_memory import BlockMemory
from loraplex.engine.kv.block_pool import NULL_BLOCK
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.kernels.attention import AttentionBatch, AttentionOptions, attend_gathered
from loraplex.kernels.kv_groups import NOT_OPEN, GroupedPages, OpenBlocks, stack_grouped_pages
from loraplex.kernels.kv_pages import (
    KeyPrefix,
    KvPages,
    PlainPages,
    QuantizedPages,
    allocate_zeros,
    make_pages,
    stack_pages,
)
from loraplex.kernels.lora_batch import BASE_ROW

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
        bits: int | None = None,
    ) -> None:
        """`bits`: of pages of `kv_groups`, instead of `code_dtype`."""
        self.sizes = sizes or Sizes()
        self.magnitude = 1.0
        """Of the answers, about."""
        self.options = options or AttentionOptions(scale=self.sizes.dim**-0.5)
        size = self.sizes.block_size
        self.chunks = sequences.chunks(size)
        window, sinks = self.options.window, self.options.num_sink_positions
        num_blocks = 1 + sum(len(chunk.tables[0]) for chunk in self.chunks)
        self._groups = [KvGroup((0,), window, sinks, num_blocks)]
        dims = (self.sizes.dim, self.sizes.value_dim)
        page_sizes = [(num_blocks, size, self.sizes.kv_heads, dim) for dim in dims]
        if bits is None:
            self.keys, self.values = (
                make_pages(each, dtype=dtype, code_dtype=code_dtype, device=CPU)
                for each in page_sizes
            )
        else:
            self.keys, self.values = _grouped_pages(page_sizes, bits, dtype)
        if self.sizes.is_latent:
            self.values = KeyPrefix(self.keys, self.sizes.value_dim)
        slots = torch.cat([self._slots(chunk) for chunk in self.chunks])
        for pages, dim in zip((self.keys, self.values), dims, strict=True):
            pages.write(slots, torch.randn(len(slots), self.sizes.kv_heads, dim).to(dtype))
            if isinstance(pages, GroupedPages):
                _poison_forms(pages, slots, self.chunks)
            elif not isinstance(pages, KeyPrefix):
                _poison(pages, slots)
        num_tokens = sum(len(chunk.token_ids) for chunk in self.chunks)
        self.q = torch.randn(num_tokens, self.sizes.heads, self.sizes.dim).to(dtype)

    def pages_on(self, device: torch.device) -> tuple[KvPages, KvPages]:
        if isinstance(self.keys, GroupedPages) and isinstance(self.values, GroupedPages):
            blocks = _open_blocks(self.keys.blocks.slots.tolist(), device)
            return _moved_groups(self.keys, blocks), _moved_groups(self.values, blocks)
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

    def captured(self, num_rows: int, *, device: torch.device = CPU) -> AttentionBatch:
        """As a captured step has it: each token in a row of its own, and padding up to so many,
        which reads the null block."""
        num_tokens = len(self.q)
        layout = DecodeLayout(
            tuple(self._groups),
            self.sizes.block_size,
            num_rows,
            max(chunk.end for chunk in self.chunks),
            has_trees=True,
        )
        inputs = DecodeInputs(layout, [NULL_BLOCK], device)
        inputs.fill(self.chunks, [BASE_ROW] * num_tokens, num_rows=num_rows)
        return inputs.attention(num_rows)[0]

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


FAR_BLOCK_BYTES = 2 << 20
"""Of a block of 16 tokens in all layers of an 8 B Llama in bf16."""


def pages_apart(
    keys: KvPages, values: KvPages, *, dtype: torch.dtype, num_before: int = 0
) -> tuple[KvPages, KvPages]:
    """The same pages in one memory, each block FAR_BLOCK_BYTES after the one before it. There are
    `num_before` other blocks before them. `dtype`: of gathered values."""
    num_blocks, device = len(keys.data) + num_before, keys.data.device
    memory = allocate_zeros((num_blocks * FAR_BLOCK_BYTES,), torch.uint8, device)
    blocks = BlockMemory(memory, FAR_BLOCK_BYTES)

    def placed(pages: KvPages) -> KvPages:
        (own,) = stack_pages(
            1,
            (num_blocks, *pages.data.shape[1:]),
            dtype=dtype,
            code_dtype=None if pages.scales is None else pages.data.dtype,
            device=device,
            allocate=blocks.take,
        ).pages
        for target, source in zip(own.tensors, pages.tensors, strict=True):
            target[num_before:] = source
        return own

    far = placed(keys)
    return far, KeyPrefix(far, values.dim) if isinstance(values, KeyPrefix) else placed(values)


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


def _grouped_pages(
    sizes: Sequence[tuple[int, int, int, int]], bits: int, dtype: torch.dtype
) -> Iterator[KvPages]:
    """Of keys and of values, with open blocks in slots of another order."""
    num_blocks = sizes[0][0]
    order = 1 + torch.randperm(num_blocks - 1)
    blocks = _open_blocks([NOT_OPEN, *order.tolist()], CPU)
    for size, is_key in zip(sizes, (True, False), strict=True):
        (pages,) = stack_grouped_pages(
            1, size, dtype=dtype, bits=bits, is_key=is_key, blocks=blocks, device=CPU
        ).pages
        yield pages


def _open_blocks(slots: Sequence[int], device: torch.device) -> OpenBlocks:
    """Of each block the slot."""
    blocks = OpenBlocks(len(slots), len(slots) - 1, device)
    ids = [block for block, slot in enumerate(slots) if slot != NOT_OPEN]
    blocks.open(ids, [slots[block] for block in ids])
    return blocks


def _poison_forms(pages: GroupedPages, written: Tensor, chunks: Sequence[SequenceChunk]) -> None:
    """NaN wherever nothing was written, and in the forms of blocks that no new token reads."""
    size = pages.block_size
    is_kept = torch.zeros(len(pages.opened), size, dtype=torch.bool)
    is_kept[pages.blocks.slots_of(written // size), written % size] = True
    is_coded = torch.zeros(len(pages.data), dtype=torch.bool)
    for chunk in chunks:
        first, last = chunk.start // size, (chunk.end - 1) // size
        table = torch.tensor(chunk.tables[0].tolist())
        is_kept[pages.blocks.slots_of(table[:first])] = False
        is_coded[table[:last]] = True
    pages.opened[~is_kept] = torch.nan
    assert pages.scales is not None
    pages.scales[~is_coded] = torch.nan


def _moved_groups(pages: GroupedPages, blocks: OpenBlocks) -> GroupedPages:
    tensors = (tensor.to(blocks.slots.device) for tensor in (*pages.tensors, pages.opened))
    return GroupedPages(*tensors, is_key=pages.is_key, blocks=blocks)


def _readable(pages: KvPages, dtype: torch.dtype) -> KvPages:
    if isinstance(pages, GroupedPages):
        codes, steps = pages.tensors
        opened = pages.opened.to(dtype).nan_to_num(0.0)
        steps = steps.nan_to_num(0.0)
        return GroupedPages(codes, steps, opened, is_key=pages.is_key, blocks=pages.blocks)
    if pages.scales is None:
        return PlainPages(pages.data.to(dtype).nan_to_num(0.0))
    return QuantizedPages(pages.data, pages.scales.nan_to_num(0.0), dtype=dtype)
