"""Requests that crowd an engine: too few blocks for them, and half of them begin alike."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.cache import kv_bytes_per_block
from loraplex.engine.kv.groups import group_layers
from loraplex.engine.model.whole_base import load_base_model
from support.engine import LocalEngine
from support.families import VOCAB_SIZE
from support.greedy import assert_greedy

NUM_REQUESTS = 30
MAX_MODEL_LEN = 100
BLOCK_SIZE = 4
NUM_BLOCKS = 52
NUM_STATES = 14


class Asked(NamedTuple):
    """One request of the crowd."""

    prompt: list[int]
    adapter: AdapterKey | None


def crowded_engine(
    model: Path,
    directory: Path,
    *,
    swap_bytes: int,
    is_async: bool = False,
    num_ranks: int = 1,
) -> LocalEngine:
    """An engine whose cache holds a third of the sequences that it may run."""
    return LocalEngine(
        model,
        directory,
        kv_block_size=BLOCK_SIZE,
        kv_cache_bytes=_cache_bytes(model),
        swap_bytes=swap_bytes,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        async_scheduling=is_async,
        tensor_parallel_size=num_ranks,
    )


def _cache_bytes(model: Path) -> int:
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    return sum(
        (NUM_STATES if group.holds_states else NUM_BLOCKS)
        * kv_bytes_per_block(group, base.kv_shapes, block_size=BLOCK_SIZE, kv_format=base.kv_format)
        for group in group_layers(base.kv_shapes, max_model_len=MAX_MODEL_LEN)
    )


def serve_crowd(
    engine: LocalEngine, adapters: Sequence[AdapterKey | None] = (None,)
) -> dict[str, Asked]:
    """What was asked, by request: in turns with each adapter, some of it in groups of three
    choices, and part of it while the rest runs."""
    for adapter in adapters:  # who waits for its adapter waits for nobody's room
        engine.generate([0], adapter)
    rng = random.Random(0)
    beginning = [rng.randrange(VOCAB_SIZE) for _ in range(17)]
    asked: dict[str, Asked] = {}
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        request = Asked(
            [*(beginning if rng.random() < 0.5 else []), *own], adapters[index % len(adapters)]
        )
        group_id = str(len(asked)) if rng.random() < 0.2 else None
        for _ in range(1 if group_id is None else 3):
            request_id = engine.submit(
                *request, max_tokens=rng.randint(1, 40), ignore_eos=True, group_id=group_id
            )
            asked[request_id] = request
        for _ in range(rng.randint(0, 2)):
            engine.step()
    engine.run()
    return asked


def check_crowd(
    engine: LocalEngine,
    asked: Mapping[str, Asked],
    dense: Mapping[AdapterKey | None, Any],
    *,
    max_router_ties: int = 0,
) -> dict[str, int]:
    """Check every answer against its dense model; return how the crowd was served.

    max_router_ties: answers that may differ if the base has routers, because a choice of experts
    lies within rounding.

    Raises AssertionError also if nothing was preempted or reused, or if a block leaked.
    """
    num_parted = 0
    for request_id, (prompt, adapter) in asked.items():
        try:
            assert_greedy(dense[adapter], prompt, engine.answers[request_id].token_ids)
        except AssertionError:
            num_parted += 1
    core, stats = engine.core, engine.core.stats()
    assert num_parted <= (max_router_ties if core.parts.base.moe_layers else 0), num_parted
    assert stats.num_preemptions > 0, "the cache was meant to be too small"
    assert (core.parts.scheduler.num_swaps > 0) == any(core.parts.plan.host.num_slots)
    assert stats.num_cached_tokens > 0, "the shared beginning was meant to be reused"
    assert stats.num_free_kv_blocks == core.info.num_kv_blocks, "blocks leaked"
    return {
        "requests": len(asked),
        "preemptions": stats.num_preemptions,
        "swaps": core.parts.scheduler.num_swaps,
        "cached_tokens": stats.num_cached_tokens,
        "router_ties": num_parted,
    }
