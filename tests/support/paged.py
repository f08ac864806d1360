"""Drives a base model over the paged cache in random chunks, as a scheduler might."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.kv.groups import group_layers, simple_groups
from loraplex.engine.kv.layout import whole_blocks
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.forward import (
    PagedForward,
    StepAdapters,
    StepAdaptersBuilder,
    run_model,
)
from loraplex.engine.model.inputs import MAX_GROUPED_ROWS, SequenceChunk, make_inputs
from loraplex.kernels.lora_batch import AdapterRun, LoraBatchBuilder

BLOCK_SIZE = 4
MAX_CHUNK = MAX_GROUPED_ROWS + 2
BASE_RUN = AdapterRun(0)


def paged_logits(
    base: BaseModel,
    sequences: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    builder: LoraBatchBuilder | None = None,
    adapters: Sequence[tuple[int, int]] | None = None,
    block_size: int = BLOCK_SIZE,
) -> list[Tensor]:
    """fp32 logits of every position of every sequence, all served in one mixed batch.

    Chunks of 0 to 18 tokens in random order over randomly scattered blocks. `adapters` names each
    sequence's (row, generation), (-1, 0) for the base; `builder` turns them into the step's batch.
    """
    rng = random.Random(seed)
    num_blocks = [-(-len(tokens) // block_size) for tokens in sequences]
    scattered = rng.sample(range(1, 1 + sum(num_blocks)), sum(num_blocks))
    tables = [block_table([scattered.pop() for _ in range(count)]) for count in num_blocks]
    cache = KvCache(
        simple_groups(base.kv_shapes, 1 + sum(num_blocks)),
        base.kv_shapes,
        block_size=block_size,
        kv_format=base.kv_format,
        device=base.device,
    )
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    rows = adapters or [(-1, 0)] * len(sequences)
    while any(done[i] < len(tokens) for i, tokens in enumerate(sequences)):
        counts = [
            min(rng.choice((0, 1, 1, 1, 3, 8, MAX_CHUNK)), len(tokens) - done[i])
            for i, tokens in enumerate(sequences)
        ]
        order = [i for i, count in enumerate(counts) if count]
        order.sort(key=lambda i: (counts[i] > 1, rows[i][0]))
        if not order:
            continue
        chunks = [
            SequenceChunk(
                sequences[i][done[i] : done[i] + counts[i]],
                done[i],
                [tables[i]] * len(cache.groups),
                rotary_start=base.rotary_contexts.start(len(sequences[i])),
            )
            for i in order
        ]
        inputs = make_inputs(chunks, groups=cache.groups, block_size=block_size, device=base.device)
        step = StepAdapters()
        if builder:
            runs = [AdapterRun(counts[i], *rows[i]) for i in order]
            num_decodes = sum(counts[i] == 1 for i in order)
            step_builder = StepAdaptersBuilder(builder, base.layout, base.head_name)
            step = step_builder.build(runs, runs, num_decodes=num_decodes)
        forward = PagedForward.of(cache, inputs, step.lora)
        everything = torch.arange(len(inputs.input_ids), device=base.device)
        with base.ends.changed_by(step, inputs.input_ids) as token_ids:
            out = run_model(base.model, forward, token_ids, inputs.positions, everything)
        for i, part in zip(order, out.split([counts[i] for i in order]), strict=True):
            logits[i].append(part)
            done[i] += counts[i]
    widest = max(part.shape[1] for parts in logits for part in parts)  # adapters may add tokens
    return [
        torch.cat([F.pad(part, (0, widest - part.shape[1])) for part in parts]) for parts in logits
    ]


def served_logits(
    base: BaseModel,
    sequences: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    attention_window: int | None = None,
    attention_sinks: int = 0,
) -> list[Tensor]:
    """As `paged_logits`, the blocks taken from pools that hold no more than they must.

    What sequences leave behind their windows is freed and overwritten by their neighbours.
    """
    rng = random.Random(seed)
    groups = tuple(
        replace(
            group,
            num_blocks=1
            + sum(group.peak_blocks(len(tokens), MAX_CHUNK, BLOCK_SIZE) for tokens in sequences),
        )
        for group in group_layers(
            base.kv_shapes,
            max_model_len=base.max_model_len,
            attention_window=attention_window,
            attention_sinks=attention_sinks,
        )
    )
    cache = KvCache(
        groups, base.kv_shapes, block_size=BLOCK_SIZE, kv_format=base.kv_format, device=base.device
    )
    kv = KvBlocks(groups, BLOCK_SIZE, prefix_secret=None)
    namespace = CacheNamespace("acme", "runtime", None, "")
    blocks = [kv.new_sequence() for _ in sequences]
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while any(done[i] < len(tokens) for i, tokens in enumerate(sequences)):
        counts = [
            min(rng.choice((0, 1, 1, 1, 3, 8, MAX_CHUNK)), len(tokens) - done[i])
            for i, tokens in enumerate(sequences)
        ]
        if kv.holds_states:
            counts = [whole_blocks(done[i], count, BLOCK_SIZE) for i, count in enumerate(counts)]
        order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: counts[i] > 1)
        if not order:
            continue
        for i in order:
            assert kv.grow(blocks[i], done[i], counts[i]), "more blocks than the layout says"
        cache.execute(kv.operations.take())
        chunks = [
            SequenceChunk(
                sequences[i][done[i] : done[i] + counts[i]],
                done[i],
                blocks[i].tables,
                rotary_start=base.rotary_contexts.start(len(sequences[i])),
            )
            for i in order
        ]
        inputs = make_inputs(chunks, groups=cache.groups, block_size=BLOCK_SIZE, device=base.device)
        forward = PagedForward.of(cache, inputs)
        everything = torch.arange(len(inputs.input_ids), device=base.device)
        out = run_model(base.model, forward, inputs.input_ids, inputs.positions, everything)
        for i, part in zip(order, out.split([counts[i] for i in order]), strict=True):
            logits[i].append(part)
            done[i] += counts[i]
            kv.advance(blocks[i], namespace, sequences[i], done[i])
    for sequence in blocks:
        kv.release(sequence)
    kv.check_integrity([])
    return [torch.cat(parts) for parts in logits]
