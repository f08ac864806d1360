"""Paged attention on CUDA: errors relative to the CPU reference, and times next to PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.attention import (
    AttentionBatch,
    AttentionOptions,
    PrefillChunk,
    SequenceGroup,
    attend_gathered,
    paged_attention,
)
from loraplex.kernels.attention_window import AttentionWindow
from loraplex.kernels.kv_groups import OpenBlocks, block_bytes, stack_grouped_pages
from loraplex.kernels.kv_pages import KvPages, make_pages, vector_bytes, write_pages
from support.attention_cases import AttentionCase, Sequences, Sizes, pages_apart

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of values around one: what a rounding of each of a sum's weights leaves."""
SIZES = {
    "llama": Sizes(8, 2, 128, 128, 16),
    "phi": Sizes(4, 4, 80, 80, 16),
    "mla": Sizes(4, 4, 192, 128, 16),
    "latent": Sizes(32, 1, 576, 512, 16, is_latent=True),
    "gemma": Sizes(8, 1, 256, 256, 16),
    "odd": Sizes(14, 2, 96, 24, 8),
}
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
BATCH = 32
CONTEXTS = (512, 2048, 8192)
CHUNKS = ((512, 512), (2048, 2048), (512, 8192))
"""New tokens of a prompt, and its tokens with them."""
FORMS: dict[str, torch.dtype | None] = {
    "bf16": None,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
GROUPED_FORMS = {"int4": 4, "int2": 2}
"""The bits of forms that quantize blocks."""
GROUPED_BLOCK_SIZE = 64
REPETITIONS = 50


def check_attention(device: str) -> dict[str, Any]:
    """The largest error of every case, where what nobody wrote is NaN; bytes written otherwise."""
    torch.manual_seed(0)
    on = torch.device(device)
    errors = {
        name: {"error": _error(case, on), "bound": TOLERANCES[case.q.dtype] * case.magnitude}
        for name, case in attention_cases()
    }
    for name, case in cases_apart():
        error = _error(case, on, are_apart=True)
        errors[name] = {"error": error, "bound": TOLERANCES[case.q.dtype]}
    writes = {form: _different_bytes(form, on) for form in (*FORMS, *GROUPED_FORMS)}
    is_close = all(found["error"] <= found["bound"] for found in errors.values())
    return {
        "ok": is_close and not any(writes.values()),
        "cases": errors,
        "bytes_written_otherwise": writes,
    }


def attention_cases() -> Iterator[tuple[str, AttentionCase]]:
    """Decodes, draft tokens, trees and chunks together, by what models and operators add to
    them. Trees are attended in rows of captured steps too."""
    mixed = Sequences([(1, 1), (700, 1), (64, 1), (570, 4), (40, 9), (330, 130), (100, 100)])
    tree = Sequences([(640, 7), (12, 5), (30, 1), (9, 4)], [[-1, -1, 0, 0, 2], [-1, 0, 0]])
    plain = AttentionOptions(0.1)
    window = replace(plain, window=AttentionWindow(100))
    sinks = replace(window, num_sink_positions=5)
    chunks = replace(plain, window=AttentionWindow(100, is_chunked=True))
    for name, sizes in SIZES.items():
        everything = replace(sinks, softcap=5.0, sinks=torch.randn(sizes.heads))
        yield f"{name}, fp32, all", AttentionCase(mixed, everything, sizes)
        yield f"{name}, bf16", AttentionCase(mixed, plain, sizes, dtype=torch.bfloat16)
    sizes = SIZES["llama"]
    slopes = replace(plain, slopes=2.0 ** -torch.linspace(1, 8, sizes.heads))
    yield "fp32", AttentionCase(mixed, plain, sizes)
    yield "fp32, window", AttentionCase(mixed, window, sizes)
    yield "fp32, window, sink positions", AttentionCase(mixed, sinks, sizes)
    yield "fp32, tree", AttentionCase(tree, plain, sizes)
    yield "fp32, chunks", AttentionCase(mixed, chunks, sizes)
    yield "fp32, slopes", AttentionCase(mixed, slopes, sizes)
    yield "bf16, tree, window", AttentionCase(tree, window, sizes, dtype=torch.bfloat16)
    yield "fp16", AttentionCase(mixed, plain, sizes, dtype=torch.float16)
    for form in ("int8", "fp8"):
        codes = FORMS[form]
        yield f"{form} for fp32", AttentionCase(mixed, plain, sizes, code_dtype=codes)
        yield (
            f"{form} for bf16",
            AttentionCase(mixed, plain, sizes, dtype=torch.bfloat16, code_dtype=codes),
        )
        small = AttentionCase(mixed, plain, sizes, dtype=torch.float16, code_dtype=codes)
        small.dominate(size=1e-4, others=1e-4)
        yield f"{form} for fp16, small values, a dominant key", small
    for form, bits in GROUPED_FORMS.items():
        for name, sizes in SIZES.items():
            if sizes.is_latent:
                continue
            sizes = replace(sizes, block_size=GROUPED_BLOCK_SIZE)
            everything = replace(sinks, softcap=5.0, sinks=torch.randn(sizes.heads))
            yield (
                f"{form} for fp32, {name}, all",
                AttentionCase(mixed, everything, sizes, bits=bits),
            )
            yield (
                f"{form} for bf16, {name}",
                AttentionCase(mixed, plain, sizes, dtype=torch.bfloat16, bits=bits),
            )
        small_blocks = replace(SIZES["llama"], block_size=16)
        yield (
            f"{form} for fp16, blocks of 16",
            AttentionCase(mixed, plain, small_blocks, dtype=torch.float16, bits=bits),
        )


def cases_apart() -> Iterator[tuple[str, AttentionCase]]:
    """For blocks that lie as far apart as where all layers' parts of a block are together."""
    mixed = Sequences([(700, 1), (570, 4), (330, 130)])
    for form, codes in FORMS.items():
        case = AttentionCase(
            mixed, AttentionOptions(0.1), SIZES["llama"], dtype=torch.bfloat16, code_dtype=codes
        )
        yield f"{form}, blocks apart", case
    yield "latent, blocks apart", AttentionCase(mixed, AttentionOptions(0.1), SIZES["latent"])


def _error(case: AttentionCase, device: torch.device, *, are_apart: bool = False) -> float:
    keys, values = case.pages_on(device)
    if are_apart:
        keys, values = pages_apart(keys, values, dtype=case.q.dtype)
    options = case.options
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.to(device))
    if options.slopes is not None:
        options = replace(options, slopes=options.slopes.to(device))
    q, expected = case.q.to(device), case.expected()
    batches = [case.batch(in_place=device.type == "cuda", device=device)]
    if any(chunk.tree is not None for chunk in case.chunks):
        batches.append(case.captured(len(q), device=device))
    found = [paged_attention(q, keys, values, batch, options) for batch in batches]
    error = max((actual.float().cpu() - expected).abs().max().item() for actual in found)
    return error if error == error else float("inf")


def _different_bytes(form: str, device: torch.device) -> int:
    """Of what a step's keys and values leave in their pages, against the CPU's."""
    num_tokens, num_slots = 300, 512
    slots = torch.randperm(num_slots)[:num_tokens]
    vectors = (
        torch.randn(2, KV_HEADS, num_tokens, DIM) * torch.logspace(-20, 4, num_tokens)[:, None]
    )
    k, v = vectors.bfloat16().transpose(1, 2)
    (keys, values), (device_keys, device_values) = (
        _empty_pages(num_slots // _block_size(form), form, place)
        for place in (torch.device("cpu"), device)
    )
    write_pages(keys, values, slots, k, v)
    write_pages(device_keys, device_values, slots.to(device), k.to(device), v.to(device))
    pairs = zip(
        keys.tensors + values.tensors, device_keys.tensors + device_values.tensors, strict=True
    )
    return sum(int((ours != other.cpu()).sum()) for ours, other in pairs)


def time_attention(device: str) -> dict[str, Any]:
    """Microseconds of one layer's attention, replayed from a graph, beside the plain op."""
    torch.manual_seed(0)
    on = torch.device(device)
    return {
        "decode": [
            _time_decode(form, context, on)
            for context in CONTEXTS
            for form in (*FORMS, *GROUPED_FORMS)
        ],
        "decode_blocks_apart": [
            _time_decode(form, CONTEXTS[1], on, are_apart=True) for form in FORMS
        ],
        "prefill": [
            _time_prefill(form, new, context, on)
            for new, context in CHUNKS
            for form in ("bf16", "int8", *GROUPED_FORMS)
        ],
    }


def _time_decode(
    form: str, context: int, device: torch.device, *, are_apart: bool = False
) -> dict[str, Any]:
    """`are_apart`: as of `cases_apart`."""
    num_blocks = BATCH * context // _block_size(form)
    keys, values = _random_pages(1 + num_blocks, form, device)
    if are_apart:
        keys, values = pages_apart(keys, values, dtype=torch.bfloat16)
    table = 1 + torch.randperm(num_blocks, device=device).view(BATCH, -1)
    group = SequenceGroup(
        torch.arange(BATCH, device=device)[:, None],
        torch.full((BATCH, 1), context - 1, device=device),
        table,
    )
    batch, options = AttentionBatch(table[:, 0], (group,), ()), AttentionOptions(DIM**-0.5)
    q = torch.randn(BATCH, HEADS, DIM, device=device, dtype=torch.bfloat16)
    seconds = graph_seconds(lambda: paged_attention(q, keys, values, batch, options))
    num_bytes = BATCH * context * _token_bytes(form)
    return {
        "form": form,
        "context": context,
        "microseconds": round(1e6 * seconds, 1),
        "gigabytes_per_second": round(num_bytes / seconds / 1e9),
        "plain_microseconds": _plain_microseconds(form, q, keys, values, batch),
    }


def _time_prefill(form: str, num_new: int, context: int, device: torch.device) -> dict[str, Any]:
    num_blocks = context // _block_size(form)
    keys, values = _random_pages(1 + num_blocks, form, device)
    table = 1 + torch.randperm(num_blocks, device=device)
    rows = torch.arange(num_new, device=device)
    group = SequenceGroup(rows[None], context - num_new + rows[None], table[None])
    chunk = PrefillChunk(0, num_new, context, table)
    options = AttentionOptions(DIM**-0.5)
    q = torch.randn(num_new, HEADS, DIM, device=device, dtype=torch.bfloat16)
    ours, plain = AttentionBatch(rows, (group,), ()), AttentionBatch(rows, (), (chunk,))
    seconds = graph_seconds(lambda: paged_attention(q, keys, values, ours, options))
    has_dense = form == "bf16" and num_new == context
    operations = 4 * HEADS * DIM * num_new * (context - (num_new - 1) / 2)
    return {
        "form": form,
        "new_tokens": num_new,
        "context": context,
        "microseconds": round(1e6 * seconds, 1),
        "teraflops": round(operations / seconds / 1e12, 1),
        "plain_microseconds": _plain_microseconds(form, q, keys, values, plain),
        "dense_microseconds": _dense_microseconds(q, context) if has_dense else None,
    }


def _plain_microseconds(
    form: str, q: Tensor, keys: KvPages, values: KvPages, batch: AttentionBatch
) -> float | None:
    """Of the plain op; None: it waits for the device, and cannot be captured."""
    if form in GROUPED_FORMS:
        return None
    options = AttentionOptions(DIM**-0.5)
    seconds = graph_seconds(lambda: attend_gathered(q, keys, values, batch, options))
    return round(1e6 * seconds, 1)


def _dense_microseconds(q: Tensor, context: int) -> float:
    """PyTorch's own causal attention over adjacent keys."""
    queries = q.transpose(0, 1)[None].contiguous()
    keys, values = torch.randn(2, 1, KV_HEADS, context, DIM, device=q.device, dtype=q.dtype)
    return round(
        1e6
        * graph_seconds(
            lambda: F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        ),
        1,
    )


def _random_pages(num_blocks: int, form: str, device: torch.device) -> tuple[KvPages, KvPages]:
    """Keys and values, with about the numbers that a model has."""
    keys, values = _empty_pages(num_blocks, form, device)
    for pages in (keys, values):
        if pages.scales is None:
            pages.data.normal_()
        elif form in GROUPED_FORMS:
            pages.data.random_(256)
            pages.scales.fill_(0.2)
        else:
            codes = (30 * torch.randn(pages.data.shape, device=device)).clamp(-127, 127)
            pages.data.copy_(codes)
            pages.scales.fill_(1 / 30)
    return keys, values


def _empty_pages(num_blocks: int, form: str, device: torch.device) -> tuple[KvPages, KvPages]:
    """Of keys and of values in bf16, in this form; every block is open."""
    size = (num_blocks, _block_size(form), KV_HEADS, DIM)
    if form in GROUPED_FORMS:
        blocks = OpenBlocks(num_blocks, None, device)
        keys, values = (
            stack_grouped_pages(
                1,
                size,
                dtype=torch.bfloat16,
                bits=GROUPED_FORMS[form],
                is_key=is_key,
                blocks=blocks,
                device=device,
            ).pages[0]
            for is_key in (True, False)
        )
        return keys, values
    keys, values = (
        make_pages(size, dtype=torch.bfloat16, code_dtype=FORMS[form], device=device)
        for _ in range(2)
    )
    return keys, values


def _block_size(form: str) -> int:
    return GROUPED_BLOCK_SIZE if form in GROUPED_FORMS else BLOCK_SIZE


def _token_bytes(form: str) -> float:
    """Bytes of a token's keys and values that attention reads."""
    if form not in GROUPED_FORMS:
        return 2 * KV_HEADS * vector_bytes(DIM, dtype=torch.bfloat16, code_dtype=FORMS[form])
    size, bits = GROUPED_BLOCK_SIZE, GROUPED_FORMS[form]
    per_block = sum(
        block_bytes(size, KV_HEADS, DIM, bits=bits, is_key=is_key) for is_key in (True, False)
    )
    return per_block / size


def graph_seconds(run: Callable[[], object]) -> float:
    """The median of replays of a captured call: the device's time without the host's."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]
    graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    spans: list[float] = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    return sorted(spans)[REPETITIONS // 2]
