"""The adapters of a step's rows, for each part of the model.

The decoder's projections and the embedding see every token, the output head only the rows whose
logits are kept. A part that no adapter of the step changes has no additional work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...adapters.layout import BaseLayout, SliceKind
from ...kernels.lora_batch import AdapterRun, LoraBatch, LoraBatchBuilder, Segment


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """One step's rows and their adapters; by default all are the base's."""

    lora: LoraBatch | None = None
    """For all tokens; None: no adapter in the whole step."""
    head: LoraBatch | None = None
    """For the logits rows; None: no adapter changes the output head."""
    embedding: tuple[Segment, ...] = ()
    """The tokens whose adapters change the input embedding."""


class StepAdaptersBuilder:
    """Builds one StepAdapters per step."""

    def __init__(
        self, batches: LoraBatchBuilder, layout: BaseLayout, head_name: str | None
    ) -> None:
        """head_name: the output head's slice, if adapters may touch it."""
        self._batches = batches
        self._embedding = next(
            (i for i, part in enumerate(layout.slices) if part.kind is SliceKind.EMBEDDING), None
        )
        self._head = None if head_name is None else layout.slice_index[head_name]

    def plain_rank(self, runs: Sequence[AdapterRun]) -> int | None:
        """The highest rank of the runs' adapters, 0 without adapters; None if one of them changes
        more than A and B of the decoder's linear layers."""
        ends = [index for index in (self._embedding, self._head) if index is not None]
        return self._batches.plain_rank(runs, elsewhere=ends)

    def build(
        self,
        runs: Sequence[AdapterRun],
        kept: Sequence[AdapterRun],
        *,
        num_decodes: int,
        num_verified: int = 0,
    ) -> StepAdapters:
        """`runs` in the order of their tokens: those of `num_decodes` tokens decode, those of the
        next `num_verified` verify draft tokens; `kept` in the order of the rows whose logits are
        kept.
        """
        lora = self._batches.build(runs, num_decodes=num_decodes, num_verified=num_verified)
        if lora is None:
            return StepAdapters()
        head = None
        if self._head is not None:
            # Few rows of many adapters, as when decoding.
            num_rows = sum(run.num_tokens for run in kept)
            head = self._batches.build_touching(self._head, kept, num_decodes=num_rows)
        embedding: tuple[Segment, ...] = ()
        if self._embedding is not None:
            embedding = self._batches.segments_touching(self._embedding, runs)
        return StepAdapters(lora, head, embedding)
