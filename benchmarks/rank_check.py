"""Groups of ranks on a device: their exchanges in captured decode steps, and decode speed.

A group of one rank exchanges with itself. It shows that NCCL's exchanges can be captured and
replayed. With two CUDA devices, two ranks are compared with one and timed. `unmeasured`: no machine
with two devices was at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.drawn_base import LARGE_SHAPE
from benchmarks.timed_engine import Order, TimedEngine, make_model, random_prompt

from loraplex.engine import parts
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.tier_key import new_tier_key
from loraplex.engine.parts import EngineParts
from loraplex.engine.ranks.followers import Followers
from loraplex.engine.ranks.rank_group import RankGroup
from loraplex.engine.ranks.rank_watch import RankWatch
from loraplex.engine.shards.group_links import connect_group
from loraplex.engine.shards.rank_place import GroupShape
from loraplex.engine.shards.rank_pulses import RankPulses
from support import engine as local_engine
from support.engine import LocalEngine
from support.greedy import parts_at_near_tie
from support.models import ALL_LINEAR_TARGETS, make_adapter, make_tiny_llama

TOLERANCE = 1e-4
"""Of the largest logit, and of a log-probability, in fp32."""
NEAR_TIE = 1e-3
"""Logit gap, fp32, that sums of parts may cross."""
RANKS = (4, 24, 7)
"""Of the adapters, the last of which is a DoRA."""
NUM_REQUESTS = 12
BATCHES = (1, 8, 32)
NUM_TOKENS = 64
NUM_WARM_TOKENS = 8
"""The first gaps of a request, which are not measured: other requests' prompts are in them."""


def check_ranks(directory: Path, *, device: str) -> dict[str, Any]:
    """A group of one rank, and of two if there are two CUDA devices, against no group: tokens,
    first logits and log-probabilities of mixed requests."""
    base = make_tiny_llama(directory / "base", num_attention_heads=4, num_key_value_heads=2)
    folders = [
        make_adapter(
            base,
            directory / f"adapter-{rank}",
            seed=rank,
            scale=0.1,
            r=rank,
            use_dora=rank == RANKS[-1],
            target_modules=ALL_LINEAR_TARGETS,
        )
        for rank in RANKS
    ]
    alone = _open(base, directory, device, size=1)
    compared = {}
    with group_of_one(torch.device(device)):
        group = _open(base, directory, device, size=1)
    compared["one_rank"] = _compare(alone, group, folders, device)
    group.close()
    if _has_two_devices(device):
        group = _open(base, directory, device, size=2)
        compared["two_ranks"] = _compare(alone, group, folders, device)
        group.close()
    alone.close()
    return {"ok": all(each["ok"] for each in compared.values()), **compared}


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """A LocalEngine that is opened here is rank 0 of a group without followers."""
    from torch._C._distributed_c10d import HashStore  # not every PyTorch has it

    shape = GroupShape(1, 1)

    def open_group(
        config: EngineConfig,
        *,
        clock: Callable[[], float],
        base_id: str | None = None,
        prefix_key: bytes | None = None,
    ) -> EngineParts:
        pulses = RankPulses(shape.size)
        group = RankGroup(
            connect_group(HashStore(), shape, 0, device, pulses),
            Followers([], lambda: None),
            RankWatch(pulses, shape, lambda _rank, _reason: None),
            ["here"],
        )
        return parts._open_parts(config, group, clock, base_id, prefix_key or new_tier_key())

    with patch.object(local_engine, "open_parts", open_group):
        yield


def time_ranks(directory: Path, device: str) -> dict[str, Any]:
    """The time of a decode step of an 8 B Llama on one rank over that on two."""
    if not _has_two_devices(device):
        return {"rows": [], "unmeasured": "there is one CUDA device"}
    model = make_model(directory, LARGE_SHAPE)
    seconds = {size: _step_seconds(model, directory, device, size) for size in (1, 2)}
    return {
        "rows": [
            {
                "batch": batch,
                "one_rank_ms": round(1000 * one, 3),
                "two_ranks_ms": round(1000 * two, 3),
                "times_as_fast": round(one / two, 3),
            }
            for batch, one, two in zip(BATCHES, seconds[1], seconds[2], strict=True)
        ]
    }


def _has_two_devices(device: str) -> bool:
    return device == "cuda" and torch.cuda.device_count() > 1


def _open(base: Path, directory: Path, device: str, *, size: int) -> LocalEngine:
    return LocalEngine(
        base,
        directory,
        device=device,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        tensor_parallel_size=size,
    )


def _compare(
    alone: LocalEngine, group: LocalEngine, folders: Sequence[Path], device: str
) -> dict[str, Any]:
    keys = [None, *(alone.add_adapter(folder) for folder in folders)]
    for folder in folders:
        group.add_adapter(folder)
    ids = [_ask(engine, keys) for engine in (alone, group)]
    expected, found = alone.tokens(ids[0]), group.tokens(ids[1])
    differing = [
        place for place, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]
    ]
    near_ties = [
        place
        for place in differing
        if parts_at_near_tie(
            alone,
            _prompt(place),
            keys[place % len(keys)],
            expected=expected[place],
            actual=found[place],
            gap=NEAR_TIE,
        )
    ]
    errors = [
        _error(alone, group, *pair)
        for place, pair in enumerate(zip(*ids, strict=True))
        if place not in differing
    ]
    stats = group.core.stats()
    is_captured = stats.num_graph_steps > 0 and stats.num_eager_decodes == 0
    return {
        "ok": differing == near_ties
        and max(errors, default=0.0) <= TOLERANCE
        and is_captured == (device == "cuda"),
        "requests": len(expected),
        "different_beyond_near_ties": len(differing) - len(near_ties),
        "near_ties": len(near_ties),
        "max_error": max(errors, default=0.0),
        "steps_replayed_from_graphs": stats.num_graph_steps,
        "decode_steps_without_graph": stats.num_eager_decodes,
    }


def _ask(engine: LocalEngine, keys: Sequence[Any]) -> list[str]:
    ids = []
    for place in range(NUM_REQUESTS):
        ids.append(
            engine.submit(
                _prompt(place),
                keys[place % len(keys)],
                max_tokens=12,
                ignore_eos=True,
                return_logits=True,
                num_logprobs=4,
            )
        )
        engine.step()
    engine.run()
    return ids


def _prompt(place: int) -> list[int]:
    return [(7 * place + 3 * column) % 200 for column in range(3 + 5 * (place % 4))]


def _error(alone: LocalEngine, group: LocalEngine, expected_id: str, found_id: str) -> float:
    """The largest difference of the first token's logits, relative to the largest, and of the later
    tokens' log-probabilities."""
    answers = alone.answers[expected_id], group.answers[found_id]
    theirs, ours = (
        np.frombuffer(answer.tokens[0].logits or b"", dtype=np.float32) for answer in answers
    )
    errors = [float(np.abs(ours - theirs).max() / np.abs(theirs).max())]
    for their, our in zip(*(answer.logprobs for answer in answers), strict=True):
        errors.append(abs(our.chosen.logprob - their.chosen.logprob))
    return max(errors)


def _step_seconds(model: Path, directory: Path, device: str, size: int) -> list[float]:
    """The median time between two tokens, by batch."""
    engine = TimedEngine(
        model,
        directory,
        device=device,
        dtype="bfloat16",
        tensor_parallel_size=size,
        max_model_len=256,
        max_num_seqs=max(BATCHES),
        kv_cache_bytes=4 << 30,
    )
    engine.warm_up(BATCHES)
    rng, found = Random(0), []
    for batch in BATCHES:
        prompts = [random_prompt(rng, LARGE_SHAPE, 32) for _ in range(batch)]
        ids = engine.send_all(Order(prompt, NUM_TOKENS) for prompt in prompts)
        engine.run()
        times = engine.timing(ids[-1]).chunks[NUM_WARM_TOKENS:]
        found.append(median(end - start for start, end in pairwise(times)))
    engine.close()
    return found
