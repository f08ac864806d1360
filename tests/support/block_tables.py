"""Block tables as lists."""

from __future__ import annotations

from loraplex.engine.kv.sequence_blocks import SequenceBlocks


def tables_of(seq: SequenceBlocks) -> list[list[int]]:
    """The sequence's block table of every KV group."""
    return [table.tolist() for table in seq.tables]
