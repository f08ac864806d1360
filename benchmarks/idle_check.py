"""How much of a decode step a CUDA device waits for the host, and whether the host waits for it.

Steps are profiled with asynchronous scheduling and without. Then steps with every kind of sampling
run while PyTorch raises an error for each call that would wait for the device: only the copies that
are read late may be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.drawn_base import LARGE_SHAPE, base_of

from loraplex.engine.step_profile import DecodeLoad, Work, profile_decode
from support.engine import LocalEngine
from support.models import make_tiny_llama

BATCHES = (32, 256)
CONTEXT = 64
NUM_STEPS = 50
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.05, "seed": 2},
    {"temperature": 1.1, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 3},
    {"logit_bias": {5: 1.5, 9: -3.0}},
    {"num_logprobs": 4},
)
"""Of requests whose steps stay in flight."""


def check_idle(directory: Path, device: str) -> dict[str, Any]:
    """The idle part of decode steps of an 8 B Llama. Raises RuntimeError, see `check_waits`."""
    rows = []
    with base_of(LARGE_SHAPE, directory, device=device) as model:
        for is_async in (True, False):
            engine = LocalEngine(
                model,
                directory,
                device=device,
                dtype="bfloat16",
                async_scheduling=is_async,
                max_model_len=2 * CONTEXT + NUM_STEPS,
                max_num_seqs=max(BATCHES),
                kv_cache_bytes=8 << 30,
            )
            rows += [_idle_part(engine, batch, is_async=is_async) for batch in BATCHES]
            engine.close()
    return {"rows": rows, **check_waits(directory, device)}


def _idle_part(engine: LocalEngine, batch: int, *, is_async: bool) -> dict[str, Any]:
    profile = profile_decode(engine.core, DecodeLoad(batch, CONTEXT, {}), NUM_STEPS)
    milliseconds = profile.step_milliseconds
    return {
        "async": is_async,
        "sequences": batch,
        "step_ms": round(milliseconds, 3),
        "idle": round(profile.milliseconds[Work.WAITING] / milliseconds, 4),
    }


def check_waits(directory: Path, device: str) -> dict[str, Any]:
    """Decode with every kind of sampling; raises RuntimeError where a step in flight is waited
    for."""
    model = make_tiny_llama(directory / "base")
    engine = LocalEngine(model, directory, device=device, async_scheduling=True)
    ids = [engine.submit(range(20), max_tokens=40, ignore_eos=True, **each) for each in SAMPLING]
    while min(len(engine.answers[request_id].token_ids) for request_id in ids) < 4:
        engine.step()
    with _no_waits(device):
        for _ in range(20):
            engine.step()
    engine.run()
    engine.close()
    return {"steps_without_waits": 20}


@contextmanager
def _no_waits(device: str) -> Iterator[None]:
    """Calls that synchronize with a CUDA device raise RuntimeError."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
