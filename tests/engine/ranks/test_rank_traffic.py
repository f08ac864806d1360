"""An engine of several ranks answers as one does, whatever happens to blocks and adapters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.messages import DeleteAdapter
from support.engine import LocalEngine
from support.families import SERVED, VOCAB_SIZE, save_family
from support.marks import marked_slow
from support.models import make_adapter
from support.ranks import followers_as_threads

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


def submit_wave(engine: LocalEngine, keys: list[AdapterKey], seed: int) -> None:
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
        )


def serve(model: Path, folders: list[Path], tmp_path: Path, **config: object) -> LocalEngine:
    """Two waves; an adapter of the first is deleted during the second."""
    engine = LocalEngine(model, tmp_path, **{**SETTINGS, **config})
    keys = [engine.add_adapter(folder) for folder in folders]
    submit_wave(engine, keys, seed=3)
    engine.run()
    submit_wave(engine, keys[1:], seed=4)
    for _ in range(5):
        engine.step()
    engine.core.handle(DeleteAdapter(keys[0], drain_seconds=60.0))
    engine.run()
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("base"), *SERVED["llama"])


@pytest.mark.parametrize("size", marked_slow((2, 4), slow={4}))
def test_mixed_traffic_has_the_tokens_of_one_rank(model: Path, tmp_path: Path, size: int) -> None:
    folders = [make_adapter(model, tmp_path / str(r), seed=r, scale=0.1, r=r) for r in RANKS]
    alone = serve(model, folders, tmp_path, kv_cache_bytes=80 * KIB, arena_bytes=200 * KIB)
    with followers_as_threads() as followers:
        together = serve(
            model,
            folders,
            tmp_path,
            kv_cache_bytes=80 * KIB // size,
            arena_bytes=140 * KIB,
            tensor_parallel_size=size,
        )
        together.close()
    alone.close()
    statistics = together.core.stats()
    assert statistics.num_swaps > 0
    assert statistics.num_preemptions > 0
    assert statistics.num_adapter_evictions > 0
    assert len(together.evicted) == 1
    assert len(followers) == size - 1
    for follower in followers:
        held = torch.zeros_like(follower.host.pool, dtype=torch.bool)
        for block in follower.host.blocks():
            held[block.extent.offset : block.extent.end] = True
        assert 0 < follower.host.pool[held].count_nonzero() == follower.host.pool.count_nonzero()
    assert not [answer.end.error for answer in together.answers.values() if answer.end.error]
    assert together.tokens(together.answers) == alone.tokens(alone.answers)
