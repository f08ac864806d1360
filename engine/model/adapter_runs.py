"""The runs of a step's chunks: whose adapter acts on which rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ...kernels.lora_batch import AdapterRun
from .inputs import SequenceChunk


class ChunkRuns(NamedTuple):
    """For `StepAdaptersBuilder.build`."""

    computed: list[AdapterRun]
    """Of all rows."""
    kept: list[AdapterRun]
    """Of the rows whose logits are kept."""


def adapter_runs(chunks: Sequence[SequenceChunk], runs: Sequence[AdapterRun]) -> ChunkRuns:
    """`runs`: for each chunk all of its tokens, under the adapter that acts on the last of them."""
    kept = [
        run._replace(num_tokens=chunk.num_logits_rows)
        for chunk, run in zip(chunks, runs, strict=True)
    ]
    if not any(chunk.num_base_tokens for chunk in chunks):
        return ChunkRuns(list(runs), kept)
    num_base_tokens = [chunk.num_base_tokens for chunk in chunks]
    num_base_kept = [
        max(chunk.num_base_tokens - len(chunk.token_ids) + chunk.num_logits_rows, 0)
        for chunk in chunks
    ]
    return ChunkRuns(
        list(chain.from_iterable(map(AdapterRun.after, runs, num_base_tokens))),
        list(chain.from_iterable(map(AdapterRun.after, kept, num_base_kept))),
    )
