"""From scheduled sequences to the tensors of one flat forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention import AttentionBatch, DecodeGroup, PrefillChunk
from .block_pool import NULL_BLOCK, padding_class
from .kv_layout import KvGroup


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    start: int
    """Position of the first token in its sequence."""
    tables: Sequence[Sequence[int]]
    """Per KV group the sequence's blocks, enough to hold the span."""
    num_kept_rows: int = 1
    """The last rows, whose logits are kept."""
    tree: Sequence[int] | None = None
    """For each of the last `len(tree)` tokens, guessed ones, the index of the one among them that
    it follows, -1 for the token before them all; None: every token follows the one before."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepInputs:
    input_ids: Tensor
    """int64 `[num_tokens]`."""
    positions: Tensor
    """int64 `[num_tokens]`."""
    attention: tuple[AttentionBatch, ...]
    """One per KV group."""
    kept_rows: tuple[int, ...]
    """Rows whose logits are kept, those of each span adjacent."""


def make_inputs(
    spans: Sequence[Span], *, groups: Sequence[KvGroup], block_size: int, device: torch.device
) -> StepInputs:
    """Lay spans one after another; those of one token must come first."""
    num_decodes = sum(len(span.token_ids) == 1 for span in spans)
    assert all(len(span.token_ids) == 1 for span in spans[:num_decodes]), "decodes come first"
    last_rows: list[int] = []
    for span in spans:
        last_rows.append((last_rows[-1] if last_rows else -1) + len(span.token_ids))
    layouts = [_Layout(index, group, block_size, device) for index, group in enumerate(groups)]
    positions = [position for span in spans for position in range(span.start, span.end)]
    return StepInputs(
        input_ids=_int64([token for span in spans for token in span.token_ids], device),
        positions=_int64(positions, device),
        attention=tuple(layout.batch(spans, last_rows, num_decodes) for layout in layouts),
        kept_rows=tuple(
            row
            for span, last_row in zip(spans, last_rows, strict=True)
            for row in range(last_row + 1 - span.num_kept_rows, last_row + 1)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    """One KV group's view of the step."""

    index: int
    group: KvGroup
    block_size: int
    device: torch.device

    def batch(
        self, spans: Sequence[Span], last_rows: Sequence[int], num_decodes: int
    ) -> AttentionBatch:
        chunks = zip(spans[num_decodes:], last_rows[num_decodes:], strict=True)
        return AttentionBatch(
            slot_mapping=_int64(self._slots(spans), self.device),
            decodes=tuple(self._decode_groups(spans[:num_decodes])),
            prefills=tuple(self._chunk(span, last_row) for span, last_row in chunks),
        )

    def _slots(self, spans: Sequence[Span]) -> list[int]:
        size = self.block_size
        slots = [
            table[position // size] * size + position % size
            for span in spans
            for table in (span.tables[self.index],)
            for position in range(span.start, span.end)
        ]
        assert min(slots) >= size, "the null block is never written"
        return slots

    def _reads(self, span: Span) -> _Reads:
        """The blocks that any of the span's queries sees."""
        size, table = self.block_size, span.tables[self.index]
        end = -(-span.end // size)
        if self.group.window is None:
            return _Reads(span, list(table[:end]), None)
        first = max(0, span.start - self.group.window + 1) // size
        sinks = min(first, self.group.num_sink_blocks(size))
        seen = [*range(sinks), *range(first, end)]
        return _Reads(span, [table[block] for block in seen], [block * size for block in seen])

    def _decode_groups(self, spans: Sequence[Span]) -> Iterator[DecodeGroup]:
        start = 0
        reads = map(self._reads, spans)
        for _, group in groupby(reads, key=lambda read: padding_class(len(read.block_ids))):
            members = list(group)
            width = max(len(read.block_ids) for read in members)
            tables = [_padded(read.block_ids, NULL_BLOCK, width) for read in members]
            # Padding begins where the sequence ends: no query sees it.
            positions = [
                _padded(read.positions, read.span.end, width)
                for read in members
                if read.positions is not None
            ]
            yield DecodeGroup(
                start=start,
                end=start + len(members),
                block_tables=_int64(tables, self.device),
                context_lens=_int64([read.span.end for read in members], self.device),
                block_positions=_int64(positions, self.device) if positions else None,
            )
            start += len(members)

    def _chunk(self, span: Span, last_row: int) -> PrefillChunk:
        _, block_ids, positions = self._reads(span)
        return PrefillChunk(
            start=last_row + 1 - len(span.token_ids),
            end=last_row + 1,
            context_len=span.end,
            block_table=_int64(block_ids, self.device),
            block_positions=None if positions is None else _int64(positions, self.device),
        )


class _Reads(NamedTuple):
    """The blocks that a span reads."""

    span: Span
    block_ids: list[int]
    positions: list[int] | None
    """Where each begins; None: at 0, without a gap."""


def _padded(values: list[int], padding: int, width: int) -> list[int]:
    return values + [padding] * (width - len(values))


def _int64(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
