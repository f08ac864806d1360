"""What attention costs a step on the CPU: decoding sequences, and a prompt.

    make bench-cpu-attention      ARGS="--dtype bfloat16 --kv-dtype int8 --json FILE"

Eight layers of a 1.1 B Llama attend one after another, each to its own keys and values, with one
thread. The figure is the CPU time of one layer, the least of several repeats. Nothing else of the
step runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from benchmarks.bench_mixed_step import SHAPES
from benchmarks.report import Row

from loraplex.api.bench.models import BaseShape
from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.kv.cache import KvCache, choose_kv_format
from loraplex.engine.kv.groups import LayerKvShape, one_group
from loraplex.engine.kv.sequence_blocks import block_table
from loraplex.engine.model.inputs import SequenceChunk, make_inputs
from loraplex.kernels.attention import AttentionOptions, paged_attention

DECODES = ((8, 160), (8, 1_024), (32, 1_024))
"""How many sequences, and the tokens of each."""
PROMPTS = ((32, 1_024), (512, 512), (512, 1_536), (2_048, 2_048))
"""New tokens, and the tokens with them."""
NUM_LAYERS = 8
"""Together they read more than the processor's caches hold."""
CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kv-dtype", type=KvDtype, choices=list(KvDtype), default=KvDtype.AUTO)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    steps = [(count, 1, context) for count, context in DECODES]
    steps += [(1, new, context) for new, context in PROMPTS]
    rows = [measure(SHAPES[options.shape], options, *step) for step in steps]
    print(f"CPU ms of a layer's attention, {options.shape}, {options.dtype}, one thread")
    print("  sequences  new tokens  context        ms")
    for row in rows:
        print("  {sequences:9}  {new tokens:10}  {context:7}{ms:10.2f}".format_map(row))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(
    shape: BaseShape, options: argparse.Namespace, num_sequences: int, num_new: int, context: int
) -> Row:
    """CPU milliseconds of a layer, for sequences of up to a block less than `context`."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    block_size = EngineConfig("", kv_dtype=options.kv_dtype).kv_block_size
    num_blocks = num_sequences * -(-context // block_size) + 1
    head_dim = shape.hidden_size // shape.num_heads
    cache = KvCache(
        one_group(NUM_LAYERS, num_blocks),
        [LayerKvShape(shape.num_kv_heads, head_dim, head_dim)] * NUM_LAYERS,
        block_size=block_size,
        kv_format=choose_kv_format(options.kv_dtype, dtype=dtype, device=CPU),
        device=CPU,
    )
    slots = torch.arange(block_size, num_blocks * block_size)
    vectors = torch.randn(len(slots), shape.num_kv_heads, head_dim).to(dtype)
    for pages in (*cache.keys.values(), *cache.values.values()):
        pages.write(slots, vectors)
    chunks = sequences(num_sequences, num_new, context, block_size)
    q = torch.randn(num_sequences * num_new, shape.num_heads, head_dim).to(dtype)
    layers = list(zip(cache.keys.values(), cache.values.values(), strict=True))
    milliseconds = []
    for _ in range(options.repeats + 1):
        inputs = make_inputs(chunks, groups=cache.groups, block_size=block_size, device=CPU)
        began = time.process_time()
        with torch.inference_mode():
            for keys, values in layers:
                paged_attention(
                    q, keys, values, inputs.attention[0], AttentionOptions(scale=head_dim**-0.5)
                )
        milliseconds.append((time.process_time() - began) * 1e3 / NUM_LAYERS)
    return {
        "sequences": num_sequences,
        "new tokens": num_new,
        "context": context,
        "ms": min(milliseconds[1:]),
    }


def sequences(number: int, num_new: int, context: int, block_size: int) -> list[SequenceChunk]:
    """Chunks at the ends of sequences whose blocks lie anywhere; decoding ones differ in length."""
    rng = Random(0)
    num_blocks = -(-context // block_size)
    ids = rng.sample(range(1, number * num_blocks + 1), number * num_blocks)
    return [
        SequenceChunk(
            [0] * num_new,
            context - num_new - index % block_size,
            [block_table(ids[index * num_blocks : (index + 1) * num_blocks])],
        )
        for index in range(number)
    ]


if __name__ == "__main__":
    main()
