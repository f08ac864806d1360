"""What fused norms, rotary embeddings and activations save a step on the CPU.

    make bench-fused-layers       ARGS="--dtype bfloat16 --json FILE"

First each op of a layer alone, beside transformers' form of it. Then whole steps of a few layers
with the shape of a larger Llama, beside the same model with transformers' own code. The two forms
take turns, and each begins as often. The figure is the CPU time of each, the least of all turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from benchmarks.bench_cpu_attention import CPU, sequences
from benchmarks.bench_mixed_step import SHAPES
from benchmarks.fused_layers_check import fused_ops
from benchmarks.report import MODELS, Row
from benchmarks.timed_engine import make_model
from torch import nn
from transformers.models.llama import modeling_llama

from loraplex.api.bench.models import BaseShape
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.kv.groups import one_group
from loraplex.engine.model.base_model import BaseModel, load_base_model
from loraplex.engine.model.forward import PagedForward, run_model
from loraplex.engine.model.fused_rotary import ServedRotary
from loraplex.engine.model.inputs import make_inputs

ROWS = (1, 16, 1_024)
STEPS = {"16 sequences decode": (16, 1, 128), "a prompt of 1,024": (1, 1_024, 1_024)}
"""The number of sequences, their new tokens, and the tokens with these."""
NUM_LAYERS = 4
VOCAB_SIZE = 8_000
BLOCK_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = replace(SHAPES[options.shape], num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE)
    dtype: torch.dtype = getattr(torch, options.dtype)
    rows = [*time_ops(shape, dtype, options.repeats)]
    options.models.mkdir(parents=True, exist_ok=True)
    base = load_base_model(
        EngineConfig(str(make_model(options.models, shape)), device="cpu", dtype=options.dtype)
    )
    rows += time_steps(base, options.repeats)
    print(f"CPU ms, {options.shape}, {options.dtype}, {options.threads} threads")
    print("                               rows   transformers     fused")
    for row in rows:
        print("  {what:25}{rows:8}{transformers:15.3f}{fused:10.3f}".format_map(row))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def time_ops(shape: BaseShape, dtype: torch.dtype, repeats: int) -> Iterator[Row]:
    """Each op of a layer."""
    for num_rows in ROWS:
        for op in fused_ops(shape, num_rows, dtype, CPU):
            times = race({"transformers": op.plain, "fused": op.fused}, repeats)
            yield {"what": op.name, "rows": num_rows, **times}


def time_steps(base: BaseModel, repeats: int) -> Iterator[Row]:
    """Whole steps of the model."""
    for name, (num_sequences, num_new, context) in STEPS.items():
        chunks = sequences(num_sequences, num_new, context)
        cache = KvCache(
            one_group(len(base.kv_shapes), num_sequences * -(-context // BLOCK_SIZE) + 1),
            base.kv_shapes,
            block_size=BLOCK_SIZE,
            kv_format=base.kv_format,
            device=CPU,
        )
        inputs = make_inputs(chunks, groups=cache.groups, block_size=BLOCK_SIZE, device=CPU)
        step = partial(
            run_model,
            base.model,
            PagedForward(cache, inputs.attention),
            inputs.input_ids,
            inputs.positions,
            torch.tensor([0]),
        )
        own_step = own_code(base.model)(step)
        times = race({"transformers": own_step, "fused": step}, repeats)
        yield {"what": name, "rows": num_sequences * num_new, **times}


@contextmanager
def own_code(model: nn.Module) -> Iterator[None]:
    """Meanwhile a fused Llama computes everything as transformers does."""
    served = modeling_llama.apply_rotary_pos_emb
    assert isinstance(served, ServedRotary)
    forwards = {
        module: module.__dict__.pop("forward")
        for module in model.modules()
        if "forward" in module.__dict__
    }
    modeling_llama.apply_rotary_pos_emb = served.own
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = served
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward


def race(forms: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least CPU milliseconds of each form; they take turns."""
    least = dict.fromkeys(forms, float("inf"))
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for name in list(forms)[:: (-1) ** turn]:
                began = time.process_time()
                forms[name]()
                least[name] = min(least[name], 1e3 * (time.process_time() - began))
    return least


if __name__ == "__main__":
    main()
