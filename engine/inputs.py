"""From scheduled sequences to the tensors of one flat forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..kernels.attention import AttentionBatch, DecodeGroup, PrefillChunk
from .block_pool import NULL_BLOCK, padding_class


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent tokens of one sequence that one step computes."""

    token_ids: Sequence[int]
    start: int
    """Position of the first token in its sequence."""
    block_ids: Sequence[int]
    """The sequence's blocks, enough to hold the span."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepInputs:
    input_ids: Tensor
    """int64 `[num_tokens]`."""
    positions: Tensor
    """int64 `[num_tokens]`."""
    attention: AttentionBatch
    last_rows: tuple[int, ...]
    """For each span, the row of its last token."""


def make_inputs(spans: Sequence[Span], *, block_size: int, device: torch.device) -> StepInputs:
    """Lay spans one after another; those of one token must come first."""
    num_decodes = sum(len(span.token_ids) == 1 for span in spans)
    assert all(len(span.token_ids) == 1 for span in spans[:num_decodes]), "decodes come first"
    positions = [position for span in spans for position in range(span.start, span.end)]
    slots = [
        span.block_ids[position // block_size] * block_size + position % block_size
        for span in spans
        for position in range(span.start, span.end)
    ]
    last_rows: list[int] = []
    chunks: list[PrefillChunk] = []
    for span in spans:
        start = last_rows[-1] + 1 if last_rows else 0
        last_rows.append(start + len(span.token_ids) - 1)
        if len(span.token_ids) > 1:
            chunks.append(_make_chunk(span, start, block_size, device))
    return StepInputs(
        input_ids=_int64([token for span in spans for token in span.token_ids], device),
        positions=_int64(positions, device),
        attention=AttentionBatch(
            slot_mapping=_int64(slots, device),
            decodes=tuple(_make_groups(spans[:num_decodes], block_size, device)),
            prefills=tuple(chunks),
        ),
        last_rows=tuple(last_rows),
    )


def _make_groups(
    spans: Sequence[Span], block_size: int, device: torch.device
) -> Iterator[DecodeGroup]:
    start = 0
    for _, group in groupby(spans, key=lambda span: padding_class(-(-span.end // block_size))):
        members = list(group)
        yield DecodeGroup(
            start=start,
            end=start + len(members),
            block_tables=_int64(_padded_tables(members, block_size), device),
            context_lens=_int64([span.end for span in members], device),
        )
        start += len(members)


def _make_chunk(span: Span, start: int, block_size: int, device: torch.device) -> PrefillChunk:
    num_blocks = -(-span.end // block_size)
    return PrefillChunk(
        start=start,
        end=start + len(span.token_ids),
        context_len=span.end,
        block_table=_int64(list(span.block_ids[:num_blocks]), device),
    )


def _padded_tables(spans: Sequence[Span], block_size: int) -> list[list[int]]:
    tables = [list(span.block_ids[: -(-span.end // block_size)]) for span in spans]
    width = max((len(table) for table in tables), default=0)
    return [table + [NULL_BLOCK] * (width - len(table)) for table in tables]


def _int64(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
