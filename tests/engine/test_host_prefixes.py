"""Cached prefixes that left the device come back from host memory, to whom they belong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch import Tensor

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.prefix_cache import CachedBlocks
from loraplex.engine.messages import DeleteAdapter
from loraplex.engine.scheduling.step_costs import StepCosts
from support.engine import LocalEngine
from support.families import STATES, VOCAB_SIZE, save_family
from support.greedy import parts_at_near_tie
from support.models import make_adapter
from support.ranks import followers_as_threads
from support.served_crowd import crowded_engine

BLOCK = 16
NUM_BLOCKS = 12
BLOCK_BYTES = 8192
"""Of the tiny base, in fp32."""
SWAP_BYTES = 1 << 20
NEAR_TIE = 1e-4
PROMPT = [3 * index % 251 for index in range(4 * BLOCK + 5)]


@pytest.fixture(autouse=True)
def _free_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pay, whatever was measured."""
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 0.0)


@pytest.fixture(scope="module")
def adapter_folders(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_base, root / f"{r}", seed=r, r=r, scale=0.1) for r in (3, 8)]


def make_engine(tiny_base: Path, tmp_path: Path, **config: object) -> LocalEngine:
    settings = {
        "kv_cache_bytes": NUM_BLOCKS * BLOCK_BYTES,
        "swap_bytes": SWAP_BYTES,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        **config,
    }
    return LocalEngine(tiny_base, tmp_path, **settings)


def ask(
    engine: LocalEngine,
    prompt: list[int],
    adapter: AdapterKey | None = None,
    tenant_id: str = "acme",
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were cached."""
    name = engine.submit(prompt, adapter, tenant_id=tenant_id, max_tokens=6, ignore_eos=True)
    engine.run()
    answer = engine.answers[name]
    assert answer.started is not None
    return answer.token_ids, answer.started.num_cached_tokens


def displace(engine: LocalEngine, seed: int = 0, tenant_id: str = "other") -> None:
    """Fill the device's blocks with others' prompts."""
    rng = random.Random(seed)
    for _ in range(4):
        ask(engine, rng.choices(range(256), k=5 * BLOCK), tenant_id=tenant_id)


def num_from_host(engine: LocalEngine) -> int:
    return engine.core.stats().num_host_cached_tokens


def test_a_displaced_prefix_comes_back_and_gives_the_same_tokens(
    tiny_base: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, num_cached = ask(engine, PROMPT)
    assert num_cached == 0
    displace(engine)
    second, num_cached = ask(engine, PROMPT)
    assert num_cached == 4 * BLOCK == num_from_host(engine)
    assert second == first
    third, num_cached = ask(engine, PROMPT)
    assert (third, num_cached) == (first, 4 * BLOCK)
    assert num_from_host(engine) == 4 * BLOCK, "it was on the device"
    stats = engine.core.stats()
    assert stats.num_blocks_from_host == 4
    assert stats.num_blocks_to_host >= 4
    assert stats.host_prefix_capacity_bytes == SWAP_BYTES
    assert stats.bytes_from_host == 4 * BLOCK_BYTES
    assert stats.bytes_to_host == stats.num_blocks_to_host * BLOCK_BYTES
    assert stats.num_device_prefix_evictions >= stats.num_blocks_to_host
    assert 0 < stats.device_prefix_bytes <= stats.kv_cache_bytes
    assert 0 < stats.host_prefix_bytes <= SWAP_BYTES
    assert stats.num_free_kv_blocks == engine.core.info.num_kv_blocks, "blocks leaked"
    engine.close()


@pytest.mark.parametrize("off", [{"swap_bytes": 0}, {"prefix_caching": False}])
def test_without_host_memory_or_prefix_cache_nothing_is_kept(
    off: dict[str, object], tiny_base: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path, **off)
    first, _ = ask(engine, PROMPT)
    displace(engine)
    assert ask(engine, PROMPT) == (first, 0)
    stats = engine.core.stats()
    assert (stats.num_blocks_to_host, stats.host_prefix_bytes) == (0, 0)
    engine.close()


def test_what_is_computed_sooner_is_not_copied(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    displace(engine)
    monkeypatch.setattr(StepCosts, "swap_seconds", lambda *_: 3600.0)
    assert ask(engine, PROMPT) == (first, 0)
    assert num_from_host(engine) == 0
    engine.close()


def test_what_is_on_the_device_and_what_is_on_the_host_make_one_prefix(
    tiny_base: Path, tmp_path: Path
) -> None:
    """The device loses a prefix from its end on, so its beginning may still be there."""
    engine = make_engine(tiny_base, tmp_path)
    long = [*PROMPT, *(5 * index % 241 for index in range(4 * BLOCK))]
    first, _ = ask(engine, long)
    ask(engine, [250 - token for token in PROMPT], tenant_id="other")
    kv = engine.core.parts.kv
    num_on_device = len([p for p in kv.groups[0].cached._prefixes.values() if p.parent == b""])
    assert num_on_device == 2, "the first block of each prompt"
    second, num_cached = ask(engine, long)
    assert second == first
    assert num_cached == len(long) // BLOCK * BLOCK
    assert 0 < num_from_host(engine) < num_cached
    engine.close()


def test_no_other_tenant_or_adapter_finds_it(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    """The same prompt, and the same adapter under another tenant."""
    engine = make_engine(tiny_base, tmp_path)
    own, sibling = (engine.add_adapter(folder) for folder in adapter_folders[:2])
    foreign = engine.add_adapter(adapter_folders[0], "globex")
    ask(engine, PROMPT, own)
    displace(engine)
    strangers = [(None, "acme"), (sibling, "acme"), (foreign, "globex")]
    for seed, (adapter, tenant_id) in enumerate(strangers, 1):
        _, num_cached = ask(engine, PROMPT, adapter, tenant_id)
        assert num_cached == 0, (adapter, tenant_id)
        displace(engine, seed)
    assert num_from_host(engine) == 0
    assert ask(engine, PROMPT, own)[1] == 4 * BLOCK == num_from_host(engine)
    engine.close()


def test_deleting_an_adapter_erases_its_prefixes_on_device_and_host(
    tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    engine = make_engine(tiny_base, tmp_path, kv_cache_bytes=2 * NUM_BLOCKS * BLOCK_BYTES)
    deleted, kept = (engine.add_adapter(folder) for folder in adapter_folders[:2])
    expected = {key: ask(engine, PROMPT, key)[0] for key in (deleted, kept)}
    displace(engine)
    displace(engine, 1)
    ask(engine, [token + 1 for token in PROMPT], deleted)  # on the device
    group = engine.core.parts.kv.groups[0]
    on_host, on_device = (places(cached) for cached in (group.host.prefixes, group.cached))
    assert len(on_host[deleted]) == len(on_host[kept]) == len(on_device[deleted]) == 4
    (device,), (host,) = cache_tensors(engine)
    assert host[:, on_host[deleted]].count_nonzero()
    assert device[:, on_device[deleted]].count_nonzero()

    engine.core.handle(DeleteAdapter(deleted, 0.0))
    engine.run()

    assert engine.evicted == [deleted]
    assert deleted not in places(group.host.prefixes)
    assert deleted not in places(group.cached)
    assert not host[:, on_host[deleted]].count_nonzero()
    assert not device[:, on_device[deleted]].count_nonzero()
    assert host[:, on_host[kept]].count_nonzero()
    assert ask(engine, PROMPT, kept) == (expected[kept], 4 * BLOCK)
    again = engine.add_adapter(adapter_folders[0])
    assert again == deleted
    assert ask(engine, PROMPT, again) == (expected[deleted], 0), "pushed again, computed again"
    engine.close()


def places(cached: CachedBlocks) -> dict[AdapterKey | None, list[int]]:
    """By adapter, the blocks or slots with its prefixes."""
    found: dict[AdapterKey | None, list[int]] = {}
    for place, prefix in cached._prefixes.items():
        found.setdefault(prefix.namespace.adapter, []).append(place)
    return found


def cache_tensors(engine: LocalEngine) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of all layers, on the device and on the host."""
    cache = engine.core.parts.runner._cache
    return cache._tensors[0], cache._host[0].tensors


def test_one_tenant_leaves_the_others_their_part_of_the_host(
    tiny_base: Path, tmp_path: Path
) -> None:
    num_slots = 16
    engine = make_engine(tiny_base, tmp_path, swap_bytes=num_slots * BLOCK_BYTES, tenant_cap=0.5)
    ask(engine, PROMPT)
    displace(engine, tenant_id="flood")
    for seed in range(1, 5):
        displace(engine, seed, tenant_id="flood")
    assert ask(engine, PROMPT)[1] == 4 * BLOCK
    engine.close()


def test_requests_that_arrive_together_share_one_copy(tiny_base: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_base, tmp_path)
    first, _ = ask(engine, PROMPT)
    displace(engine)
    names = [engine.submit(PROMPT, max_tokens=6, ignore_eos=True) for _ in range(2)]
    engine.run()
    assert engine.tokens(names) == [first, first]
    assert engine.core.stats().num_blocks_from_host == 4
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "kv_cache_bytes"), [("int8", 30_720), ("int4", 230_000), ("int2", 230_000)]
)
def test_quantized_blocks_come_back_as_they_were(
    kv_dtype: str, kv_cache_bytes: int, tiny_base: Path, tmp_path: Path
) -> None:
    """A hit on the device is the reference: its codes are those that the host has."""
    engine = make_engine(tiny_base, tmp_path, kv_dtype=kv_dtype, kv_cache_bytes=kv_cache_bytes)
    ask(engine, PROMPT)
    expected, num_cached = ask(engine, PROMPT)
    assert num_cached == 4 * BLOCK
    for seed in range(4):
        displace(engine, seed)
    assert ask(engine, PROMPT) == (expected, 4 * BLOCK)
    assert num_from_host(engine) == 4 * BLOCK
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"speculation": ("ngram",)},
        {"speculation": ("early_exit:1",)},
        {"async_scheduling": True},
    ],
    ids=["ngram", "early exit", "steps in flight"],
)
def test_a_crowd_has_the_tokens_of_requests_alone(
    config: dict[str, object], tiny_base: Path, adapter_folders: list[Path], tmp_path: Path
) -> None:
    alone = LocalEngine(tiny_base, tmp_path, prefix_caching=False)
    crowd = make_engine(
        tiny_base, tmp_path, kv_cache_bytes=16 * BLOCK_BYTES, max_num_seqs=5, **config
    )
    keys = [alone.add_adapter(folder) for folder in adapter_folders]
    assert [crowd.add_adapter(folder) for folder in adapter_folders] == keys
    for key in keys:  # so that nobody waits for a load, and the pool is too small for all at once
        ask(crowd, [1], key)
    rng = random.Random(1)
    beginnings = [rng.choices(range(256), k=3 * BLOCK) for _ in range(6)]
    cases = []
    for _ in range(40):
        prompt = rng.choice(beginnings) + rng.choices(range(256), k=rng.randint(1, 20))
        cases.append((prompt, rng.choice([None, *keys]), rng.randint(1, 20)))
    names = []
    for prompt, adapter, max_tokens in cases:
        names.append(crowd.submit(prompt, adapter, max_tokens=max_tokens, ignore_eos=True))
        for _ in range(rng.randint(0, 2)):
            crowd.step()
    crowd.run()
    num_near_ties = 0
    for (prompt, adapter, max_tokens), actual in zip(cases, crowd.tokens(names), strict=True):
        name = alone.submit(prompt, adapter, max_tokens=max_tokens, ignore_eos=True)
        alone.run()
        expected = alone.answers[name].token_ids
        if actual != expected:
            assert parts_at_near_tie(
                alone, prompt, adapter, expected=expected, actual=actual, gap=NEAR_TIE
            )
            num_near_ties += 1
    assert num_near_ties <= 2
    stats = crowd.core.stats()
    assert stats.num_host_cached_tokens > 10 * BLOCK
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert stats.num_free_kv_blocks == crowd.core.info.num_kv_blocks, "blocks leaked"
    alone.close()
    crowd.close()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_stages"), [(2, 1), (1, 2)])
def test_ranks_and_stages_copy_their_parts(
    num_ranks: int, num_stages: int, tiny_base: Path, tmp_path: Path
) -> None:
    alone = LocalEngine(tiny_base, tmp_path, prefix_caching=False)
    expected, _ = ask(alone, PROMPT)
    alone.close()
    with followers_as_threads():
        engine = make_engine(
            tiny_base,
            tmp_path,
            num_threads=1,
            kv_cache_bytes=NUM_BLOCKS * BLOCK_BYTES // (num_ranks * num_stages),
            tensor_parallel_size=num_ranks,
            pipeline_parallel_size=num_stages,
        )
        assert ask(engine, PROMPT) == (expected, 0)
        displace(engine)
        assert ask(engine, PROMPT) == (expected, 4 * BLOCK)
        assert num_from_host(engine) == 4 * BLOCK
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_next", "mamba2"])
def test_a_snapshot_of_states_comes_back(case: str, tmp_path: Path) -> None:
    """Beside keys and values, and alone."""
    model_type, differences = STATES[case]
    untied = {**differences, "tie_word_embeddings": False}
    model = save_family(tmp_path / "model", model_type, untied)
    engine = crowded_engine(model, tmp_path, swap_bytes=SWAP_BYTES)
    prompt = [token % VOCAB_SIZE for token in PROMPT[:41]]
    first, _ = ask(engine, prompt)
    rng = random.Random(0)
    for _ in range(30):
        ask(engine, rng.choices(range(VOCAB_SIZE), k=41), tenant_id="other")
    second, num_cached = ask(engine, prompt)
    assert second == first
    assert num_cached == num_from_host(engine) > 0
    engine.close()
