from __future__ import annotations

import dataclasses
import random

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.block_pool import BlockPool
from loraplex.engine.kv_blocks import KvBlocks
from loraplex.engine.kv_layout import KvGroup
from loraplex.engine.prefix_cache import ROOT_KEY, CacheNamespace, PrefixCache

SIZE = 4
ADAPTER = AdapterKey("acme", "sha256:aa")
NAMESPACE = CacheNamespace("acme", "runtime", ADAPTER)


def make_cache(num_blocks: int = 64, secret: bytes = b"s" * 32) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, SIZE, secret=secret)


def store(
    pool: BlockPool, cache: PrefixCache, namespace: CacheNamespace, tokens: list[int]
) -> list[int]:
    """Publish all full blocks of a sequence and let go of them."""
    blocks = pool.allocate(len(tokens) // SIZE)
    assert blocks is not None
    key = ROOT_KEY
    for index, block_id in enumerate(blocks):
        part = tokens[index * SIZE : (index + 1) * SIZE]
        key = cache.publish(namespace, key, part, block_id)
    pool.free(blocks)
    return blocks


def test_finds_the_longest_prefix_but_leaves_a_token_to_compute() -> None:
    pool, cache = make_cache()
    tokens = list(range(12))
    blocks = store(pool, cache, NAMESPACE, tokens)
    for length, expected in ((12, 2), (13, 3), (4, 0), (5, 1), (11, 2)):
        found, _ = cache.match(NAMESPACE, [*tokens, 99, 98][:length])
        assert found == blocks[:expected]
        pool.free(found)
    assert cache.match(NAMESPACE, [0, 1, 2, 3, 7, 7, 7, 7, 7])[0] == blocks[:1]


def test_identical_namespaces_meet_and_any_difference_keeps_them_apart() -> None:
    tokens = list(range(9))
    others = [
        dataclasses.replace(NAMESPACE, tenant_id="globex"),
        dataclasses.replace(NAMESPACE, runtime_id="other"),
        dataclasses.replace(NAMESPACE, adapter=None),
        dataclasses.replace(NAMESPACE, adapter=AdapterKey("acme", "sha256:ab")),
        dataclasses.replace(NAMESPACE, adapter=AdapterKey("globex", "sha256:aa")),
        dataclasses.replace(NAMESPACE, label="attestation"),
        # Fields must not run into one another.
        CacheNamespace("acmeruntime", "", ADAPTER),
        CacheNamespace("acme", "runtime", None, label="sha256:aa"),
    ]
    pool, cache = make_cache()
    blocks = store(pool, cache, NAMESPACE, tokens)
    assert cache.match(dataclasses.replace(NAMESPACE), tokens)[0] == blocks
    for other in others:
        assert cache.match(other, tokens)[0] == []


def test_a_block_counts_only_behind_the_same_parents() -> None:
    pool, cache = make_cache()
    store(pool, cache, NAMESPACE, [1, 1, 1, 1, 2, 2, 2, 2])
    assert cache.match(NAMESPACE, [9, 9, 9, 9, 2, 2, 2, 2, 0])[0] == []
    assert cache.match(NAMESPACE, [2, 2, 2, 2, 0])[0] == []


def test_a_colliding_key_is_a_miss_and_never_a_wrong_answer() -> None:
    pool, cache = make_cache()
    store(pool, cache, NAMESPACE, [1, 1, 1, 1])
    cache._key = lambda *_: next(iter(cache._block_by_key))  # type: ignore[method-assign]
    assert cache.match(NAMESPACE, [2, 2, 2, 2, 0])[0] == []


def test_keys_depend_on_the_secret() -> None:
    pool, cache = make_cache(secret=b"a" * 32)
    other_pool, other_cache = make_cache(secret=b"b" * 32)
    for owner, held in ((pool, cache), (other_pool, other_cache)):
        store(owner, held, NAMESPACE, [1, 1, 1, 1])
    assert cache._block_by_key.keys().isdisjoint(other_cache._block_by_key)


def test_a_reused_block_is_no_longer_found() -> None:
    pool, cache = make_cache(num_blocks=3)
    store(pool, cache, NAMESPACE, [1, 1, 1, 1])
    assert pool.allocate(2) is not None
    assert len(cache) == 0
    assert cache.match(NAMESPACE, [1, 1, 1, 1, 0])[0] == []


def test_publishing_known_content_keeps_the_first_block() -> None:
    pool, cache = make_cache()
    first = store(pool, cache, NAMESPACE, [1, 1, 1, 1])
    store(pool, cache, NAMESPACE, [1, 1, 1, 1])
    assert cache.match(NAMESPACE, [1, 1, 1, 1, 0])[0] == first
    assert len(cache) == 1


def test_dropping_an_adapter_forgets_its_blocks_and_no_others() -> None:
    pool, cache = make_cache()
    base = dataclasses.replace(NAMESPACE, adapter=None)
    store(pool, cache, NAMESPACE, list(range(8)))
    kept = store(pool, cache, base, list(range(8)))
    assert cache.drop_adapter(ADAPTER) == 2
    assert cache.match(NAMESPACE, list(range(9)))[0] == []
    assert cache.match(base, list(range(9)))[0] == kept


def test_agrees_with_a_plain_model_over_a_random_walk() -> None:
    """Every hit must be content that was published and not reused since."""
    rng = random.Random(1)
    pool, cache = make_cache(num_blocks=12)
    content: dict[int, tuple[CacheNamespace, tuple[int, ...]]] = {}
    namespaces = [NAMESPACE, dataclasses.replace(NAMESPACE, tenant_id="globex")]
    num_hits = 0
    for _ in range(3000):
        namespace = rng.choice(namespaces)
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        found, key = cache.match(namespace, tokens)
        for index, block_id in enumerate(found):
            assert content[block_id] == (namespace, tuple(tokens[: (index + 1) * SIZE]))
        num_hits += len(found)
        fresh = pool.allocate(len(tokens) // SIZE - len(found))
        if fresh is None:
            pool.free(found)
            continue
        for index, block_id in enumerate(fresh, len(found)):
            part = tokens[index * SIZE : (index + 1) * SIZE]
            content[block_id] = (namespace, tuple(tokens[: (index + 1) * SIZE]))
            key = cache.publish(namespace, key, part, block_id)
        pool.free([*found, *fresh])
        pool.check_integrity()
    assert num_hits > 200, "a walk without hits proves nothing"


def test_of_a_thousand_pairs_the_identical_meet_and_those_that_differ_in_one_field_never() -> None:
    """`runtime_id` also names the type of the keys and values."""
    rng = random.Random(2)
    kv = KvBlocks([KvGroup((0,), None, 0, 6000)], SIZE, prefix_secret=b"s" * 32)
    fields = ("tenant_id", "runtime_id", "adapter", "label", "token")
    for number in range(1000):
        tokens = [rng.randrange(32_000) for _ in range(9)]
        adapter = AdapterKey("acme", f"sha256:{number}")
        stored = CacheNamespace("acme", "base/int8", adapter, str(number))
        writer = kv.new_sequence()
        assert kv.grow(writer, 0, 9)
        kv.advance(writer, stored, tokens, 9)
        kv.release(writer)
        asked, other_tokens = stored, list(tokens)
        field = fields[number % len(fields)]
        if field == "token":
            other_tokens[rng.randrange(SIZE)] ^= 1
        elif field == "adapter":
            other_adapter = AdapterKey("acme", f"sha256:{number}x")
            asked = dataclasses.replace(stored, adapter=other_adapter)
        else:
            asked = dataclasses.replace(stored, **{field: getattr(stored, field) + "x"})
        assert kv.match(kv.new_sequence(), asked, other_tokens) == 0
        reader = kv.new_sequence()
        assert kv.match(reader, dataclasses.replace(stored), list(tokens)) == 8
        kv.release(reader)
