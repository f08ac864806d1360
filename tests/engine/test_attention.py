"""Paged attention compared with an explicit softmax per sequence."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from loraplex.engine.kv.cache import KvCache, KvFormat
from loraplex.engine.kv.groups import LayerKvShape, one_group
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.kernels import attention
from loraplex.kernels.attention import AttentionOptions, paged_attention
from loraplex.kernels.attention_window import AttentionWindow
from support.attention_cases import AttentionCase, Sequences

CPU = torch.device("cpu")
BLOCK = 4
HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 8, 5
SINKS = torch.randn(HEADS, generator=torch.Generator().manual_seed(9))
SLOPES = 2.0 ** -torch.arange(1.0, HEADS + 1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """q `[queries, heads, dim]` at the end of k, v `[context, kv_heads, dim]`; in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for index in range(len(q)):
        position = len(k) - len(q) + index
        first = 0 if options.window is None else max(0, options.window.first_visible(position))
        for head in range(HEADS):
            source = head // (HEADS // KV_HEADS)
            scores = k[first : position + 1, source] @ q[index, head] * options.scale
            if options.softcap:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            if options.slopes is not None:
                distances = torch.arange(first, position + 1) - position
                scores = scores + options.slopes[head] * distances
            weights = scores.exp()
            total = weights.sum()
            if options.sinks is not None:
                total = total + options.sinks[head].double().exp()
            out[index, head] = (weights[:, None] * v[first : position + 1, source]).sum(0) / total
    return out


def attend_in_pieces(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding sequences gather this many tokens' keys at a time; this many of a prompt attend."""
    token_bytes = 4 * KV_HEADS * DIM // torch.get_num_threads()
    monkeypatch.setattr(attention, "GATHERED_BYTES_PER_THREAD", num_tokens * token_bytes)
    monkeypatch.setattr(attention, "MAX_PIECE_TOKENS", num_tokens)


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(scale=0.3),
        AttentionOptions(scale=0.3, window=AttentionWindow(3)),
        AttentionOptions(scale=0.3, window=AttentionWindow(5, is_chunked=True)),
        AttentionOptions(scale=0.3, softcap=0.7),
        AttentionOptions(scale=0.3, sinks=SINKS),
        AttentionOptions(scale=0.3, slopes=SLOPES),
        AttentionOptions(0.3, AttentionWindow(6), softcap=2.0, sinks=SINKS, slopes=SLOPES),
    ],
    ids=["plain", "window", "chunk", "softcap", "sinks", "slopes", "all"],
)
@pytest.mark.parametrize("piece", [3, 256], ids=["in pieces", "whole"])
def test_equals_plain_attention_for_decodes_and_chunks_of_every_size(
    options: AttentionOptions, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_in_pieces(piece, monkeypatch)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    contexts = [1, BLOCK - 1, BLOCK, BLOCK + 1, 90, 9, 21, 30, 2, 5]
    queries = [1, 1, 1, 1, 1, 9, 5, 30, 2, 3]
    num_blocks = [-(-context // BLOCK) for context in contexts]
    free = rng.sample(range(1, 1 + sum(num_blocks)), sum(num_blocks))
    tables = [block_table([free.pop() for _ in range(count)]) for count in num_blocks]
    cache = KvCache(
        one_group(1, 1 + sum(num_blocks)),
        [LayerKvShape(KV_HEADS, DIM, VALUE_DIM)],
        block_size=BLOCK,
        kv_format=KvFormat(torch.float32),
        device=CPU,
    )
    keys = [torch.randn(n, KV_HEADS, DIM, generator=generator) for n in contexts]
    values = [torch.randn(n, KV_HEADS, VALUE_DIM, generator=generator) for n in contexts]
    for history in (True, False):
        chunks = [
            SequenceChunk([0] * (n - count), 0, [table])
            if history
            else SequenceChunk([0] * count, n - count, [table])
            for n, count, table in zip(contexts, queries, tables, strict=True)
        ]
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].token_ids) > 1)
        order = [i for i in order if chunks[i].token_ids]
        inputs = make_inputs(
            [chunks[i] for i in order], groups=cache.groups, block_size=BLOCK, device=CPU
        )
        (batch,) = inputs.attention
        k = torch.cat([keys[i][chunks[i].start : chunks[i].end] for i in order])
        v = torch.cat([values[i][chunks[i].start : chunks[i].end] for i in order])
        cache.keys[0].write(batch.slot_mapping, k)
        cache.values[0].write(batch.slot_mapping, v)

    q = torch.randn(sum(queries), HEADS, DIM, generator=generator)
    out = paged_attention(q, cache.keys[0], cache.values[0], batch, options)

    start = 0
    for i in order:
        expected = plain_attention(q[start : start + queries[i]], keys[i], values[i], options)
        assert (out[start : start + queries[i]] - expected).abs().max() < 1e-5
        start += queries[i]


@pytest.mark.parametrize("window", [None, AttentionWindow(4), AttentionWindow(4, True)], ids=str)
@pytest.mark.parametrize("piece", [3, 256], ids=["in pieces", "whole"])
def test_tokens_of_trees_attend_to_what_they_follow_alone(
    piece: int, window: AttentionWindow | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_in_pieces(piece, monkeypatch)
    generator = torch.Generator().manual_seed(2)
    starts, trees = (9, 11, 10), ((-1, -1, 0, 1), (-1, 0, 0, 2), (-1, 0, 1, -1))
    num_rows = 1 + len(trees[0])
    tables = [block_table(range(1 + 4 * index, 5 + 4 * index)) for index in range(3)]
    cache = KvCache(
        one_group(1, 13),
        [LayerKvShape(KV_HEADS, DIM, VALUE_DIM)],
        block_size=BLOCK,
        kv_format=KvFormat(torch.float32),
        device=CPU,
    )
    keys = [torch.randn(start + num_rows, KV_HEADS, DIM, generator=generator) for start in starts]
    values = [
        torch.randn(start + num_rows, KV_HEADS, VALUE_DIM, generator=generator) for start in starts
    ]
    for index, table in enumerate(tables):
        whole = SequenceChunk([0] * len(keys[index]), 0, [table])
        made = make_inputs([whole], groups=cache.groups, block_size=BLOCK, device=CPU)
        cache.keys[0].write(made.attention[0].slot_mapping, keys[index])
        cache.values[0].write(made.attention[0].slot_mapping, values[index])
    chunks = [
        SequenceChunk([0] * num_rows, start, [table], num_rows, tree)
        for start, table, tree in zip(starts, tables, trees, strict=True)
    ]
    inputs = make_inputs(chunks, groups=cache.groups, block_size=BLOCK, device=CPU)
    assert [len(group.rows) for group in inputs.attention[0].groups] == [3]
    q = torch.randn(3 * num_rows, HEADS, DIM, generator=generator)
    options = AttentionOptions(scale=0.3, window=window)
    out = paged_attention(q, cache.keys[0], cache.values[0], inputs.attention[0], options)

    whole_path = AttentionOptions(scale=0.3)
    for index, (start, tree) in enumerate(zip(starts, trees, strict=True)):
        for row in range(num_rows):
            path = [row]
            while path[0]:
                path.insert(0, 1 + tree[path[0] - 1])
            seen = [*range(start), *(start + place for place in path)]
            if window is not None:
                seen = seen[max(window.first_visible(len(seen) - 1), 0) :]
            token = index * num_rows + row
            expected = plain_attention(
                q[token : token + 1], keys[index][seen], values[index][seen], whole_path
            )
            assert (out[token] - expected[0]).abs().max() < 1e-5


@pytest.mark.parametrize("code_dtype", [None, torch.int8], ids=["plain", "int8"])
def test_windows_sinks_and_trees_are_the_same_in_pieces(
    code_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AttentionCase(
        Sequences([(150, 1), (60, 20), (90, 1), (70, 6), (33, 33)], [None] * 3 + [(-1, 0, 0, 1)]),
        AttentionOptions(scale=0.3, window=AttentionWindow(11), num_sink_positions=3),
        code_dtype=code_dtype,
    )
    whole = case.expected()
    attend_in_pieces(5, monkeypatch)
    assert (case.expected() - whole).abs().max() < 1e-6


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(("size", "others"), [(1e-4, 1e-4), (1.0, 1e-4), (500.0, 1e-4)])
def test_int8_values_of_any_size_keep_their_precision_in_fp16_beside_a_dominant_key(
    size: float, others: float, softcap: float | None
) -> None:
    case = AttentionCase(
        Sequences([(150, 1), (60, 20)]),
        AttentionOptions(scale=0.3, softcap=softcap),
        dtype=torch.float16,
        code_dtype=torch.int8,
    )
    case.dominate(size=size, others=others)
    exact = case.expected(torch.float64)
    error = (case.expected(torch.float16) - exact).abs().amax(-1) / exact.abs().amax(-1)
    assert error.max() < 1.5e-3


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="what MKL does is compared")
def test_a_token_s_attention_is_the_same_to_the_bit_however_many_are_verified_with_it() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = LayerKvShape(KV_HEADS, 16, 16, None)
    cache = KvCache(
        one_group(1, 4), [shape], block_size=32, kv_format=KvFormat(torch.float32), device=CPU
    )
    keys, values = cache.keys[0], cache.values[0]
    for pages in (keys, values):
        pages.data[1:3] = torch.randn(pages.data[1:3].shape, generator=generator)
    q = torch.randn(6, HEADS, 16, generator=generator)
    results = []
    for num_rows in (1, 2, 3, 4, 6):  # from one position on, which attends to as many keys
        chunk = SequenceChunk([0] * num_rows, start=40, tables=[block_table([1, 2])])
        inputs = make_inputs([chunk], groups=cache.groups, block_size=32, device=CPU)
        options = AttentionOptions(scale=0.3)
        results.append(paged_attention(q[:num_rows], keys, values, inputs.attention[0], options)[0])
    for result in results[1:]:
        assert torch.equal(result, results[0])
