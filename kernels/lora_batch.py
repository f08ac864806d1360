"""The adapter of each token in a step, in the forms that the kernels need.

Built once per step and shared by every layer and projection. Tokens of decoding sequences come
first, then those of sequences that verify drafts, then prefills. Within each group, tokens that
share an adapter are adjacent where possible. On the CPU in half dtypes, the first group uses the
compact window, and so does the second while it is small; everything else uses segments.

In bf16 a step of five tokens, `[decode of row 2, decode of the base, two of row 7, one of row 2]`,
is

    token_rows = [2, -1, 7, 7, 2]    num_decodes = 2
    decode_adapters = (row 2,)       segments = ([2, 4) row 7, [4, 5) row 2)

and `auxiliary` is ([0, 1) row 2, [4, 5) row 2) if row 2's adapter has auxiliary tensors. In fp32
`num_decodes` is 0 and the segments begin with [0, 1) row 2. On CUDA one launch applies all vectors,
and `auxiliary` has only the adapters that replace a matrix of the base or rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from .lora_weights import AdapterWeights

BASE_ROW = -1
"""The table row of a token that no adapter changes."""
MAX_VERIFIED_IN_WINDOW = 64
"""In the window each token meets every adapter, a segment costs some calls. On one core, no AMX,
two layers of a Llama of 1.1 B, bf16, 16 adapters of rank 16: 32 tokens took 28 ms in the window and
42 in segments, 80 took 48 and 38."""
TILE_TOKENS = 16
"""The size of every tile in every step, the smallest that `tl.dot` supports: other rows of a step
change no product's shape, and so no bit of a row. See decision 33."""


class AdapterRun(NamedTuple):
    """The tokens that one sequence adds to a step, and the adapter they run under."""

    num_tokens: int
    row: int = BASE_ROW
    generation: int = 0
    """Distinguishes the adapters that hold the same row one after another."""


class Segment(NamedTuple):
    """Adjacent tokens `[start, end)` of one adapter."""

    start: int
    end: int
    row: int


@dataclass(frozen=True, slots=True, order=True)
class ActiveAdapter:
    """An adapter that decodes in this step."""

    row: int
    generation: int


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The step's work for the Triton kernels.

    A tile serves the tokens of `[start, end)`, at most `TILE_TOKENS` of them, whose adapter is
    `row`. Each tile owns at least one token, so a grid of num_tokens tiles always suffices.
    """

    tiles: Tensor
    """int32 `[num_tiles, 3]`: start, end, row; a row of -1 is no work."""
    max_rank: int
    """No adapter of the step has a slice of a higher rank."""


class LoraNeeds(NamedTuple):
    """What the kernels must serve in a step."""

    rank: int
    """The highest rank of its adapters, 0 without adapters."""
    has_vectors: bool
    """Whether one of them has vectors; see `lora_vectors`."""
    has_experts: bool = False
    """Whether one of them changes experts; see `lora_experts`."""


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """One step's tokens and their adapters."""

    token_rows: Tensor
    """int32 `[num_tokens]` on the device: table row, -1 for the base model."""
    num_decodes: int
    """The first `num_decodes` tokens are those of decoding sequences; 0 where those are served like
    all others."""
    decode_adapters: tuple[ActiveAdapter, ...]
    """Each adapter of those tokens once, by row."""
    segments: tuple[Segment, ...]
    """The other tokens that have an adapter."""
    tiles: LoraTiles | None
    """None on devices without Triton."""
    side_stream: torch.cuda.Stream | None = None
    """The stream for work that does not need the base's result; None: it runs after the base."""
    launches_vectors: bool = False
    """One launch per projection applies the vectors of all tokens' adapters."""
    launches_experts: bool = False
    """The step is captured, and adapters of its replays may change experts."""
    auxiliary: tuple[Segment, ...] = ()
    """The tokens whose adapters have auxiliary tensors for some slice, besides those that are
    applied by one launch."""

    @property
    def adapter_rows(self) -> frozenset[int]:
        """The table rows that any token runs under; of a captured step none is known."""
        decoding = {adapter.row for adapter in self.decode_adapters}
        return frozenset(decoding.union(segment.row for segment in self.segments))


class LoraBatchBuilder:
    """Builds one LoraBatch per step for one device."""

    def __init__(self, weights: AdapterWeights, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._has_window = has_window(weights.flat.dtype, device)
        self._ranks: dict[int, tuple[int, int]] = {}  # row: (generation, highest rank)

    def build(
        self, runs: Sequence[AdapterRun], *, num_decodes: int, num_verified: int = 0
    ) -> LoraBatch | None:
        """The batch of these runs, in the order of their tokens; None if all run the base model.

        The first `num_decodes` tokens belong to decoding sequences and end at the end of a run. So
        do the next `num_verified` tokens, of sequences that verify drafts: a window serves them
        like decodes as long as that is faster.
        """
        if all(run.row == BASE_ROW for run in runs):
            return None
        if self._has_window and num_decodes + num_verified <= MAX_VERIFIED_IN_WINDOW:
            num_decodes += num_verified
        if not self._has_window and not self._is_cuda:
            num_decodes = 0
        decoding, prefilling = _split(runs, num_decodes)
        token_rows = list(
            chain.from_iterable(repeat(row, num_tokens) for num_tokens, row, _ in runs)
        )
        adapters = {
            ActiveAdapter(run.row, run.generation) for run in decoding if run.row != BASE_ROW
        }
        return LoraBatch(
            token_rows=self._to_device(token_rows),
            num_decodes=num_decodes,
            decode_adapters=tuple(sorted(adapters)),
            segments=tuple(_segments(prefilling, num_decodes)),
            tiles=self.make_tiles(runs, num_decodes=num_decodes) if self._is_cuda else None,
            launches_vectors=self._is_cuda and bool(self._rows_with_auxiliary(runs)),
            auxiliary=self._auxiliary(runs),
        )

    def _auxiliary(self, runs: Sequence[AdapterRun]) -> tuple[Segment, ...]:
        rows = self._rows_with_auxiliary(runs)
        if self._is_cuda:
            rows &= self._weights.replacing_rows
        if not rows:
            return ()
        return tuple(segment for segment in _segments(runs, 0) if segment.row in rows)

    def _rows_with_auxiliary(self, runs: Sequence[AdapterRun]) -> set[int]:
        held = self._weights.row_auxiliary
        return {run.row for run in runs if run.row != BASE_ROW and held[run.row]}

    def rows_touching(self, slice_index: int, runs: Sequence[AdapterRun]) -> set[int]:
        """The table rows of the runs whose adapters change this slice."""
        tables, held = self._weights.row_tables, self._weights.row_auxiliary
        rows = {run.row for run in runs if run.row != BASE_ROW}
        return {row for row in rows if tables[row][slice_index][2] or slice_index in held[row]}

    def build_touching(
        self, slice_index: int, runs: Sequence[AdapterRun], *, num_decodes: int
    ) -> LoraBatch | None:
        """Like `build`, for one slice: runs of adapters that do not change it count as the
        base's."""
        return self.build(self._only_touching(slice_index, runs), num_decodes=num_decodes)

    def segments_touching(
        self, slice_index: int, runs: Sequence[AdapterRun]
    ) -> tuple[Segment, ...]:
        """All tokens, including decoding ones, whose adapters change this slice."""
        return tuple(_segments(self._only_touching(slice_index, runs), 0))

    def _only_touching(self, slice_index: int, runs: Sequence[AdapterRun]) -> list[AdapterRun]:
        rows = self.rows_touching(slice_index, runs)
        return [run if run.row in rows else AdapterRun(run.num_tokens) for run in runs]

    def make_tiles(self, runs: Sequence[AdapterRun], *, num_decodes: int) -> LoraTiles:
        """The same step as tiles, for the Triton kernels."""
        decoding, prefilling = _split(runs, num_decodes)
        segments = list(_segments(prefilling, num_decodes))
        decode_rows = [run.row for run in decoding for _ in range(run.num_tokens)]
        tiles = plan_tiles(decode_rows, segments)
        max_rank = max((self._max_rank(run) for run in runs if run.row != BASE_ROW), default=0)
        return LoraTiles(self._to_device(tiles).view(-1, 3), max_rank)

    def needs(
        self, runs: Sequence[AdapterRun], *, elsewhere: Sequence[int], experts: Sequence[int] = ()
    ) -> LoraNeeds | None:
        """What kernels alone must serve for these runs; None if they cannot: an adapter replaces a
        matrix of the base or rows of it, or changes one of the slices `elsewhere`.

        `experts`: the slices of experts. Their rank is that of each expert, so it needs no more
        room than the same rank of a linear layer.
        """
        if any(self.rows_touching(index, runs) for index in elsewhere):
            return None
        rows = self._rows_with_auxiliary(runs)
        if not rows.isdisjoint(self._weights.replacing_rows):
            return None
        adapters = {run for run in runs if run.row != BASE_ROW}
        return LoraNeeds(
            max(map(self._max_rank, adapters), default=0),
            has_vectors=bool(rows),
            has_experts=any(self.rows_touching(index, runs) for index in experts),
        )

    def _max_rank(self, run: AdapterRun) -> int:
        generation, rank = self._ranks.get(run.row, (-1, 0))
        if generation != run.generation:
            rank = max(entry[2] for entry in self._weights.row_tables[run.row])
            self._ranks[run.row] = (run.generation, rank)
        return rank

    def _to_device(self, values: Sequence[int] | Sequence[tuple[int, int, int]]) -> Tensor:
        # From page-locked memory, so that the copy waits for no kernel that is still running.
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self._is_cuda)
        return host.to(self._device, non_blocking=True)


def has_window(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether decoding tokens meet their adapters in a window: where calling a matmul costs more
    than its arithmetic, as oneDNN's in half types does. See `lora_window`."""
    return device.type == "cpu" and dtype != torch.float32


def plan_tiles(
    decode_rows: Sequence[int], segments: Sequence[Segment]
) -> list[tuple[int, int, int]]:
    """(start, end, row) of every tile: each decode block once per adapter in it, then segments."""
    tiles = []
    for start in range(0, len(decode_rows), TILE_TOKENS):
        end = min(start + TILE_TOKENS, len(decode_rows))
        rows = set(decode_rows[start:end]) - {BASE_ROW}
        tiles += [(start, end, row) for row in sorted(rows)]
    for segment in segments:
        for start in range(segment.start, segment.end, TILE_TOKENS):
            tiles.append((start, min(start + TILE_TOKENS, segment.end), segment.row))
    return tiles


def _split(
    runs: Sequence[AdapterRun], num_decodes: int
) -> tuple[Sequence[AdapterRun], Sequence[AdapterRun]]:
    ends = [0, *accumulate(run.num_tokens for run in runs)]
    assert num_decodes in ends, "the decoding tokens end where a run ends"
    return runs[: ends.index(num_decodes)], runs[ends.index(num_decodes) :]


def _segments(runs: Sequence[AdapterRun], start: int) -> Iterable[Segment]:
    end, current = start, BASE_ROW
    for num_tokens, row, _ in runs:
        if row != current:
            if current != BASE_ROW and end > start:
                yield Segment(start, end, current)
            start, current = end, row
        end += num_tokens
    if current != BASE_ROW and end > start:
        yield Segment(start, end, current)
