"""The adapter of each token in a step, in the forms that the kernels need.

Built once per step and shared by every layer and projection. Tokens of decoding sequences come
first, then those of sequences that verify drafts, then prefills. Within each group, tokens that
share an adapter are adjacent where possible.

A step of five tokens, `[decode of row 2, decode of the base, two of row 7, one of row 2]`, is

    token_rows = [2, -1, 7, 7, 2]

for the CPU's library. PyTorch, where there is none, gets `segments`: [0, 1) row 2, [2, 4) row 7 and
[4, 5) row 2. `auxiliary` is ([0, 1) row 2, [4, 5) row 2) if row 2's adapter has auxiliary tensors.
On CUDA one launch applies all vectors, and `auxiliary` has only the adapters that replace a matrix
of the base or rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from . import lora_cpu
from .lora_weights import AdapterWeights

BASE_ROW = -1
"""The table row of a token that no adapter changes."""
TILE_TOKENS = 16
"""The size of every tile in every step, the smallest that `tl.dot` supports: other rows of a step
change no product's shape, and so no bit of a row. See decision 33."""


class AdapterRun(NamedTuple):
    """The tokens that one sequence adds to a step, and the adapter they run under."""

    num_tokens: int
    row: int = BASE_ROW
    generation: int = 0
    """Distinguishes the adapters that hold the same row one after another."""

    def after(self, num_base_tokens: int) -> tuple[AdapterRun, ...]:
        """The run, with its first tokens left to the base: fewer than all."""
        if not num_base_tokens:
            return (self,)
        num_tokens = self.num_tokens - num_base_tokens
        return AdapterRun(num_base_tokens), self._replace(num_tokens=num_tokens)


class Segment(NamedTuple):
    """Adjacent tokens `[start, end)` of one adapter."""

    start: int
    end: int
    row: int


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


class AdapterRuns:
    """A step's runs as segments, which few models need: made when the first layer asks."""

    def __init__(self, runs: Sequence[AdapterRun]) -> None:
        self._runs = runs

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(_segments(self._runs, 0))


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """One step's tokens and their adapters."""

    token_rows: Tensor
    """int32 `[num_tokens]` on the device: table row, -1 for the base model."""
    segments: tuple[Segment, ...]
    """The tokens with an adapter, if PyTorch serves them; empty if kernels do."""
    adapter_rows: frozenset[int]
    """The table rows that any token runs under; of a captured step none is known."""
    max_rank: int
    """No adapter of the step has a slice of a higher rank."""
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
    runs: AdapterRuns | None = None
    """None: the step is captured."""

    @property
    def adapter_segments(self) -> tuple[Segment, ...]:
        """All tokens with an adapter, including decoding ones; of a captured step none is known."""
        return self.runs.segments if self.runs else ()


class LoraBatchBuilder:
    """Builds one LoraBatch per step for one device."""

    def __init__(self, weights: AdapterWeights, device: torch.device) -> None:
        self._weights = weights
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._has_kernels = self._is_cuda or lora_cpu.is_served(weights.flat.dtype, device)
        self._ranks: dict[int, tuple[int, int]] = {}  # row: (generation, highest rank)

    def build(self, runs: Sequence[AdapterRun], *, num_decodes: int) -> LoraBatch | None:
        """The batch of these runs, in the order of their tokens; None if all run the base model.

        The first `num_decodes` tokens belong to decoding sequences and end at the end of a run.
        """
        rows = frozenset(run.row for run in runs) - {BASE_ROW}
        if not rows:
            return None
        tiles = self.make_tiles(runs, num_decodes=num_decodes) if self._is_cuda else None
        return LoraBatch(
            token_rows=self._to_device(_token_rows(runs)),
            segments=() if self._has_kernels else tuple(_segments(runs, 0)),
            adapter_rows=rows,
            max_rank=tiles.max_rank if tiles else self._max_rank_of(runs),
            tiles=tiles,
            launches_vectors=self._is_cuda and bool(self._rows_with_auxiliary(runs)),
            auxiliary=self._auxiliary(runs),
            runs=AdapterRuns(runs),
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

    def vocab_sizes(self, runs: Sequence[AdapterRun]) -> dict[int, int]:
        """By table row, the vocabulary of the runs' adapters that have another than the base."""
        sizes = self._weights.row_vocabularies
        return {run.row: sizes[run.row] for run in runs if run.row in sizes} if sizes else {}

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
        ends = [0, *accumulate(run.num_tokens for run in runs)]
        assert num_decodes in ends, "the decoding tokens end where a run ends"
        num_runs = ends.index(num_decodes)
        segments = list(_segments(runs[num_runs:], num_decodes))
        decode_rows = _token_rows(runs[:num_runs])
        tiles = plan_tiles(decode_rows, segments)
        return LoraTiles(self._to_device(tiles).view(-1, 3), self._max_rank_of(runs))

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
        return LoraNeeds(
            self._max_rank_of(runs),
            has_vectors=bool(rows),
            has_experts=any(self.rows_touching(index, runs) for index in experts),
        )

    def _max_rank_of(self, runs: Sequence[AdapterRun]) -> int:
        adapters = {run for run in runs if run.row != BASE_ROW}
        return max(map(self._max_rank, adapters), default=0)

    def _max_rank(self, run: AdapterRun) -> int:
        generation, rank = self._ranks.get(run.row, (-1, 0))
        if generation != run.generation:
            rank = max(entry[2] for entry in self._weights.row_tables[run.row])
            self._ranks[run.row] = (run.generation, rank)
        return rank

    def _to_device(self, values: Sequence[int] | Sequence[tuple[int, int, int]]) -> Tensor:
        # From page-locked memory, so that the copy waits for no kernel that is still running.
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self._is_cuda)
        return host.to(self.device, non_blocking=True)


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


def _token_rows(runs: Sequence[AdapterRun]) -> list[int]:
    return list(chain.from_iterable(repeat(run.row, run.num_tokens) for run in runs))


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
