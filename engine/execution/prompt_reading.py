"""Computes prompt log-probabilities, embeddings and classifications for requests that ask for
them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...adapters.arena import Arena
from ..messages import PromptOutput, TokenLogprobs
from ..scheduling.batch import ScheduledSequence
from .execution import StepRows
from .pooling import pool
from .runner import StepOutput
from .sampler import MAX_DRAWN_CELLS, logprobs_of, ranks_of


def read_prompt(
    arena: Arena, sequence: ScheduledSequence, output: StepOutput, rows: StepRows
) -> PromptOutput | None:
    """The results for the positions `sequence.read`; None while a pooling is incomplete.

    Raises NumericalError if a value is not finite.
    """
    request, read = sequence.request, sequence.read
    if request.reads_logits:
        logits = output.logits[rows.kept.start : rows.kept.start + len(read)]
        targets = request.token_ids[read.start + 1 : read.stop + 1]
        num_top = request.submitted.num_prompt_logprobs or 0
        return PromptOutput(request.request_id, logprobs=_logprobs(logits, targets, num_top))
    assert output.token_states is not None, "a step with an embedding keeps its states"
    first = rows.computed.start + read.start - sequence.start
    head = None if sequence.lease is None else arena.classification_head(sequence.lease.row)
    vector = pool(request, output.token_states[first : first + len(read)], head)
    return None if vector is None else PromptOutput(request.request_id, embedding=vector)


def _logprobs(logits: Tensor, targets: list[int], num_top: int) -> list[TokenLogprobs]:
    """The log-probability of each row's target, computed for a part of the rows at a time."""
    size = max(MAX_DRAWN_CELLS // logits.shape[-1], 1)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(targets), size):
        part = slice(start, start + size)
        found = logprobs_of(logits[part], targets[part], num_top)
        ranks = ranks_of(logits[part], targets[part])
        entries += [replace(entry, rank=rank) for entry, rank in zip(found, ranks, strict=True)]
    return entries
