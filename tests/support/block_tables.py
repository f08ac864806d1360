"""Block tables as lists."""

from __future__ import annotations

from loraplex.engine.kv.sequence_blocks import SequenceBlocks


def tables_of(seq: SequenceBlocks) -> list[list[int]]:
    """The sequence's block table of every KV group."""
    return [table.tolist() for table in seq.tables]


def targets_of(seq: SequenceBlocks) -> list[list[int]]:
    """The targets of its compaction, likewise; empty if it has none."""
    return [target.tolist() for target in seq.targets]


def blocks_of(seq: SequenceBlocks) -> list[list[int]]:
    """All blocks that it holds, of every KV group."""
    tables = tables_of(seq)
    targets = targets_of(seq) or [[] for _ in tables]
    return [[*table, *target] for table, target in zip(tables, targets, strict=True)]
