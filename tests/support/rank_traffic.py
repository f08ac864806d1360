"""Traffic that preempts, swaps, drafts, evicts and deletes, for engines of any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import DeleteAdapter
from support.engine import LocalEngine
from support.families import VOCAB_SIZE

KIB = 1 << 10
RANKS = (4, 7, 2, 16, 8, 5)
NUM_REQUESTS = 20
"""Of each of two waves."""
SETTINGS: dict[str, object] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_block_size": 4,
    "swap_bytes": 64 * KIB,
    "host_cache_bytes": 200 * KIB,
    "speculation": ("ngram",),
}


def serve_waves(
    model: Path, folders: Sequence[Path], blocks: Path, *, num_ranks: int, seed: int = 3
) -> LocalEngine:
    """An engine after two waves; an adapter of the first is deleted during the second. Each rank
    has so little memory that sequences are swapped and adapters evicted."""
    engine = LocalEngine(
        model,
        blocks,
        **SETTINGS,
        kv_cache_bytes=80 * KIB // num_ranks,
        arena_bytes=(200 if num_ranks == 1 else 140) * KIB,
        tensor_parallel_size=num_ranks,
    )
    keys = [engine.add_adapter(folder) for folder in folders]
    _submit_wave(engine, keys, seed)
    engine.run()
    _submit_wave(engine, keys[1:], seed + 1)
    for _ in range(5):
        engine.step()
    engine.core.handle(DeleteAdapter(keys[0], drain_seconds=60.0))
    engine.run()
    return engine


def _submit_wave(engine: LocalEngine, keys: list[AdapterKey], seed: int) -> None:
    """Requests of base and adapters, half of them at temperature 1, with repeating prompts."""
    rng = random.Random(seed)
    for index in range(NUM_REQUESTS):
        key = rng.choice(keys) if rng.random() < 0.85 else None
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3, 20))] * 2
        engine.submit(
            prompt,
            key,
            max_tokens=rng.randrange(4, 24),
            temperature=float(index % 2),
            seed=index,
            num_logprobs=2,
        )
