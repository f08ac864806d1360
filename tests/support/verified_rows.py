"""Runs a base model over the paged cache like a step that verifies draft tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex.engine.kv.cache import KvCache
from loraplex.engine.kv.groups import group_layers
from loraplex.engine.kv.sequence_blocks import BlockTable, block_table
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.forward import (
    PagedForward,
    StepAdapters,
    StepAdaptersBuilder,
    run_model,
)
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.kernels.lora_batch import AdapterRun, LoraBatchBuilder

BLOCK_SIZE = 4
BASE_ADAPTER = (-1, 0)


class DraftRows(NamedTuple):
    """Known tokens, and the draft tokens that follow them."""

    known: list[int]
    drafted: list[int]
    tree: list[int] | None
    """Parents; None: a chain."""

    def text(self, index: int) -> list[int]:
        """The tokens up to the draft token of this index; -1: the known ones."""
        path: list[int] = []
        while index >= 0:
            path.append(self.drafted[index])
            index = index - 1 if self.tree is None else self.tree[index]
        return self.known + path[::-1]

    @property
    def texts(self) -> list[list[int]]:
        """Of each row that is verified."""
        return [self.text(index) for index in range(-1, len(self.drafted))]


def random_draft(
    rng: random.Random, num_known: int, num_drafted: int, *, vocab_size: int, is_tree: bool = False
) -> DraftRows:
    tokens = [rng.randrange(vocab_size) for _ in range(num_known + num_drafted)]
    tree = [rng.randrange(-1, index) if index else -1 for index in range(num_drafted)]
    return DraftRows(tokens[:num_known], tokens[num_known:], tree if is_tree else None)


class Verifier:
    """A base model over scattered blocks, the layers of one window together."""

    def __init__(
        self,
        base: BaseModel,
        draft_tokens: Sequence[DraftRows],
        *,
        builder: LoraBatchBuilder | None = None,
        adapters: Sequence[tuple[int, int]] | None = None,
        attention_window: int | None = None,
        attention_sinks: int = 0,
    ) -> None:
        rng = random.Random(0)
        groups = group_layers(
            base.kv_shapes,
            max_model_len=base.max_model_len,
            attention_window=attention_window,
            attention_sinks=attention_sinks,
        )
        counts = [-(-(len(rows.known) + len(rows.drafted)) // BLOCK_SIZE) for rows in draft_tokens]
        self.tables: list[list[BlockTable]] = [[] for _ in draft_tokens]
        for _ in groups:
            free = rng.sample(range(1, 1 + sum(counts)), sum(counts))
            for tables, count in zip(self.tables, counts, strict=True):
                tables.append(block_table([free.pop() for _ in range(count)]))
        self.cache = KvCache(
            [replace(group, num_blocks=1 + sum(counts)) for group in groups],
            base.kv_shapes,
            block_size=BLOCK_SIZE,
            kv_format=base.kv_format,
            device=base.device,
        )
        self.draft_tokens = draft_tokens
        self._base = base
        self._adapters = adapters or [BASE_ADAPTER] * len(draft_tokens)
        self._steps = StepAdaptersBuilder(builder, base.layout, base.head_name) if builder else None

    def prefill(self) -> None:
        """Compute all known tokens but the last of each."""
        chunks = [
            SequenceChunk(rows.known[:-1], 0, tables)
            for rows, tables in zip(self.draft_tokens, self.tables, strict=True)
        ]
        self.run(chunks, num_decodes=0)

    def verify(self) -> list[Tensor]:
        """Per draft token the fp32 logits of its last known token and of all that follow."""
        chunks = [
            SequenceChunk(
                [rows.known[-1], *rows.drafted],
                len(rows.known) - 1,
                tables,
                num_logits_rows=1 + len(rows.drafted),
                tree=rows.tree,
            )
            for rows, tables in zip(self.draft_tokens, self.tables, strict=True)
        ]
        logits = self.run(chunks, num_decodes=sum(len(chunk.token_ids) for chunk in chunks))
        return list(logits.split([len(chunk.token_ids) for chunk in chunks]))

    def run(self, chunks: Sequence[SequenceChunk], *, num_decodes: int) -> Tensor:
        runs = [
            AdapterRun(len(chunk.token_ids), *adapter)
            for chunk, adapter in zip(chunks, self._adapters, strict=True)
        ]
        occupied = [chunk for chunk in chunks if chunk.token_ids]
        step = StepAdapters()
        if self._steps:
            step = self._steps.build(runs, runs, num_decodes=num_decodes)
        inputs = make_inputs(
            occupied, groups=self.cache.groups, block_size=BLOCK_SIZE, device=self._base.device
        )
        rows = torch.arange(len(inputs.input_ids))
        forward = PagedForward.of(self.cache, inputs, step.lora)
        with self._base.ends.changed_by(step, inputs.input_ids) as token_ids:
            return run_model(self._base.model, forward, token_ids, inputs.positions, rows)
