"""The files that an adapter's block is read from: its own, or those of a composition's members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .block import BlockHeader, Extra, read_block_header
from .errors import NotComposable
from .identity import AdapterKey


class WeightedFile(NamedTuple):
    """One file's share of a block."""

    path: Path
    header: BlockHeader
    weight: float
    """The factor of its delta."""
    first_rows: Mapping[int, int]
    """Slice index to the rank at which its rows begin, among those of the block."""


@dataclass(frozen=True)
class BlockFiles:
    """The headers of an adapter's files; the block joins the ranks of all."""

    key: AdapterKey
    paths: tuple[Path, ...]
    headers: tuple[BlockHeader, ...]
    """In the order of `AdapterKey.parts`, like `paths`."""

    @classmethod
    def open(cls, key: AdapterKey, paths: Sequence[Path]) -> BlockFiles:
        """Read the headers. Raises ObjectCorrupt as `read_block_header`, NotComposable if a member
        of a composition has auxiliary tensors, OSError."""
        assert len(paths) == len(key.parts), "each part has a file"
        files = cls(key, tuple(paths), tuple(map(read_block_header, paths)))
        if key.members and any(header.auxiliary for header in files.headers):
            raise NotComposable
        return files

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """Slice index to the rank of the block."""
        ranks: Counter[int] = Counter()
        for header in self.headers:
            ranks.update(header.ranks)
        return ranks

    @property
    def auxiliary(self) -> tuple[Extra, ...]:
        """The auxiliary tensors; a composition has none."""
        return () if self.key.members else self.headers[0].auxiliary

    def weighted(self) -> Iterator[WeightedFile]:
        """Each file, in order."""
        weights = [member.weight for member in self.key.members] or [1.0]
        first_rows: Counter[int] = Counter()
        for path, header, weight in zip(self.paths, self.headers, weights, strict=True):
            yield WeightedFile(path, header, weight, Counter(first_rows))
            first_rows.update(header.ranks)
