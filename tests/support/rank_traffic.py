"""Mixed traffic for engines of any number of ranks: everything that moves blocks and adapters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.kv_policy import EvictionMethod, KvPolicy
from loraplex.engine.messages import DeleteAdapter, EngineInfo, Pooling, SpeculationParams
from loraplex.engine.shards.rank_place import GroupShape
from support.engine import Answer, LocalEngine
from support.medusa import save_untrained_heads
from support.models import make_adapter, make_tiny_llama

KIB = 1 << 10
RANKS = (4, 7, 2, 16, 8, 5)
"""Of the adapters, of which one is a DoRA."""
NUM_REQUESTS = 12
"""Of each wave, some of them with several choices. There is one of each kind."""
PROPOSERS = ("ngram", "draft", "early_exit", "medusa_tree")
BYTES = range(97, 123)
"""Tokens of the tokenizer that are letters."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kv_block_size": 4,
    "swap_bytes": 128 * KIB,
    "host_cache_bytes": 240 * KIB,
}


class Traffic:
    """Waves of requests, the same for every engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = make_tiny_llama(folder / "base", tie_word_embeddings=False)
        save_untrained_heads(self.base, folder / "heads")
        self._adapters = [
            make_adapter(self.base, folder / str(r), seed=r, scale=0.1, r=r, use_dora=r == 7)
            for r in RANKS
        ]

    def serve(
        self,
        shape: GroupShape,
        *,
        has_drafts: bool = True,
        seed: int = 3,
        num_waves: int = 2,
        **more: object,
    ) -> LocalEngine:
        """An engine after some waves; an adapter of the first is deleted during the second. Each
        rank has so little memory that sequences are preempted and adapters evicted. `more`: further
        settings."""
        settings = {**self.settings(shape, has_drafts=has_drafts), **more}
        engine = LocalEngine(self.base, self.folder, **settings)
        keys = [engine.add_adapter(folder) for folder in self._adapters]
        _submit_wave(engine, keys, seed)
        engine.run()
        _submit_wave(engine, keys[1:], seed + 1)
        for _ in range(5):
            engine.step()
        engine.core.handle(DeleteAdapter(keys[0], drain_seconds=60.0))
        engine.run()
        for number in range(2, num_waves):
            _submit_wave(engine, keys[1:], seed + number)
            engine.run()
        return engine

    @cached_property
    def blocks(self) -> dict[AdapterKey, Path]:
        """The files of the adapters."""
        engine = LocalEngine(self.base, self.folder, dtype="float32")
        for folder in self._adapters:
            engine.add_adapter(folder)
        engine.close()
        return engine.paths

    def settings(self, shape: GroupShape, *, has_drafts: bool = True) -> dict[str, Any]:
        """Of an engine's configuration."""
        size, num_stages = shape
        return {
            **SETTINGS,
            "speculation": self._proposers(num_stages) if has_drafts else (),
            "kv_cache_bytes": _kv_kib(shape) * KIB // num_stages,
            "arena_bytes": (240 if size == 1 else 160) * KIB // num_stages,
            "tensor_parallel_size": size,
            "pipeline_parallel_size": num_stages,
        }

    def _proposers(self, num_stages: int) -> tuple[str, ...]:
        """Early exit is refused with stages."""
        early_exit = () if num_stages > 1 else ("early_exit:1",)
        heads = self.folder / "heads"
        return ("ngram", f"draft:{self.base}", *early_exit, f"medusa_tree:{heads}")


def _kv_kib(shape: GroupShape) -> int:
    """Of a rank, over all stages: little, so that sequences are preempted. With stages, the least
    that a sequence needs: there, steps begin with fewer requests."""
    if shape.size == 1:
        return 96
    # A rank has half of the KV heads, also one of four.
    return (72 if shape.num_stages == 1 else 64) // min(shape.ranks_per_stage, 2)


class Asked(NamedTuple):
    """One request of a wave."""

    prompt: list[int]
    adapter: AdapterKey | None
    settings: dict[str, Any]
    """The other arguments of `make_request`."""


def wave(keys: Sequence[AdapterKey], seed: int) -> Iterator[Asked]:
    """Requests of base and adapters, half of them at temperature 1."""
    rng = random.Random(seed)
    prefix = [rng.randrange(200) for _ in range(16)]
    for index in range(NUM_REQUESTS):
        key = rng.choice(keys) if rng.random() < 0.85 else None
        body = [rng.choice(BYTES) for _ in range(rng.randrange(3, 14))] * 2
        settings: dict[str, Any] = {
            "max_tokens": rng.randrange(4, 24),
            "temperature": float(index % 2),
            "num_logprobs": 2,
            "ignore_eos": True,
            "speculation": SpeculationParams(PROPOSERS[index % len(PROPOSERS)], 4),
        }
        settings |= _kind(index, rng)
        prompt = prefix + body if index % 3 == 0 or "kv_policy" in settings else body
        for choice in range(3 if "group_id" in settings else 1):
            yield Asked(prompt, key, {**settings, "seed": 10 * index + choice})


def _submit_wave(engine: LocalEngine, keys: Sequence[AdapterKey], seed: int) -> None:
    for prompt, key, settings in wave(keys, seed):
        engine.submit(prompt, key, **served(settings, engine.core.info))


def served(settings: dict[str, Any], info: EngineInfo) -> dict[str, Any]:
    """The settings of a request of a wave, without what this engine refuses."""
    asked = settings["speculation"]
    if asked is not None and asked.proposer not in info.proposers:
        settings = {**settings, "speculation": None}
    if info.kv_policy_obstacle:
        settings = {name: value for name, value in settings.items() if name != "kv_policy"}
    return settings


def events(engine: LocalEngine) -> dict[str, int]:
    """How often the traffic met what it is for."""
    stats = engine.core.stats()
    ends = [answer.end for answer in engine.answers.values()]
    return {
        "preemptions": stats.num_preemptions,
        "swaps": stats.num_swaps,
        "adapter_evictions": stats.num_adapter_evictions,
        "deletions": len(engine.evicted),
        "cached_tokens": stats.num_cached_tokens,
        "accepted_drafts": sum(end.num_accepted_tokens for end in ends),
        **{
            f"drafts_of_{totals.proposer}": totals.num_drafts for totals in stats.speculation_totals
        },
    }


def is_same(answer: Answer, other: Answer) -> bool:
    """Whether two answers have the same tokens, and what was read of their prompts is close."""
    if answer.token_ids != other.token_ids:
        return False
    own, others = _read(answer), _read(other)
    return len(own) == len(others) and np.allclose(own, others, atol=1e-4)


def _read(answer: Answer) -> list[float]:
    """The prompt's log-probabilities, which come in parts, and its embedding."""
    found = []
    for part in answer.prompts:
        found += np.frombuffer(part.embedding or b"", dtype=np.float32).tolist()
        found += [entry.chosen.logprob for entry in part.logprobs or ()]
    return found


def _kind(index: int, rng: random.Random) -> dict[str, Any]:
    """What is special about every second request."""
    match index % 12:
        case 1:
            return {"group_id": f"g{index}-{rng.random()}"}
        case 3:
            grammar = GrammarSpec(GrammarKind.REGEX, "[a-f]{2,9}(xy|yx)*z")
            return {"grammar": grammar, "ignore_eos": False}
        case 5:
            return {"kv_policy": KvPolicy(EvictionMethod.H2O, 20)}
        case 7:
            return {"kv_policy": KvPolicy(EvictionMethod.SNAPKV, 33)}
        case 9:
            return {"num_prompt_logprobs": 1}
        case 11:
            return {"pooling": Pooling.MEAN, "max_tokens": 0, "speculation": None}
    return {}
