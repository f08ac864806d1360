"""Which prompt prefixes are reused, and by which requests."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.kv.blocks import KvBlocks
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.kv.prefix_cache import ROOT_KEY, CacheNamespace, Prefix, PrefixHasher
from support.block_tables import tables_of

SIZE = 4
ADAPTER = AdapterKey("acme", "sha256:aa")
NAMESPACE = CacheNamespace("acme", "runtime", ADAPTER)


def make_blocks(num_usable: int = 64) -> KvBlocks:
    return KvBlocks([KvGroup((0,), None, 0, num_usable + 1)], SIZE, prefix_secret=b"s" * 32)


def store(kv: KvBlocks, namespace: CacheNamespace, tokens: list[int]) -> list[int]:
    """Compute a sequence and let go of it; the blocks that it filled."""
    seq = kv.new_sequence()
    assert kv.grow(seq, 0, len(tokens))
    kv.advance(seq, namespace, tokens, len(tokens))
    blocks = tables_of(seq)[0][: len(tokens) // SIZE]
    kv.release(seq)
    return blocks


def match(kv: KvBlocks, namespace: CacheNamespace, tokens: list[int]) -> list[int]:
    """The blocks that a new sequence with these tokens would share."""
    seq = kv.new_sequence()
    num_tokens = kv.match(seq, namespace, tokens)
    blocks = tables_of(seq)[0]
    assert num_tokens == len(blocks) * SIZE
    kv.release(seq)
    return blocks


def test_finds_the_longest_prefix_but_leaves_a_token_to_compute() -> None:
    kv = make_blocks()
    tokens = list(range(12))
    blocks = store(kv, NAMESPACE, tokens)
    for length, expected in ((12, 2), (13, 3), (4, 0), (5, 1), (11, 2)):
        assert match(kv, NAMESPACE, [*tokens, 99, 98][:length]) == blocks[:expected]
    assert match(kv, NAMESPACE, [0, 1, 2, 3, 7, 7, 7, 7, 7]) == blocks[:1]


def test_identical_namespaces_meet_and_any_difference_keeps_them_apart() -> None:
    tokens = list(range(9))
    others = [
        dataclasses.replace(NAMESPACE, tenant_id="globex"),
        dataclasses.replace(NAMESPACE, runtime_id="other"),
        dataclasses.replace(NAMESPACE, adapter=None),
        dataclasses.replace(NAMESPACE, adapter=AdapterKey("acme", "sha256:ab")),
        dataclasses.replace(NAMESPACE, adapter=AdapterKey("globex", "sha256:aa")),
        dataclasses.replace(NAMESPACE, label="attestation"),
        dataclasses.replace(NAMESPACE, rotary_start=4096),
        # Fields must not run into one another.
        CacheNamespace("acmeruntime", "", ADAPTER),
        CacheNamespace("acme", "runtime", None, label="sha256:aa"),
    ]
    kv = make_blocks()
    blocks = store(kv, NAMESPACE, tokens)
    assert match(kv, dataclasses.replace(NAMESPACE), tokens) == blocks
    for other in others:
        assert match(kv, other, tokens) == []


def test_a_block_counts_only_behind_the_same_parents() -> None:
    kv = make_blocks()
    store(kv, NAMESPACE, [1, 1, 1, 1, 2, 2, 2, 2])
    assert match(kv, NAMESPACE, [9, 9, 9, 9, 2, 2, 2, 2, 0]) == []
    assert match(kv, NAMESPACE, [2, 2, 2, 2, 0]) == []


def test_a_colliding_key_is_a_miss_and_never_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixHasher, "key", lambda *_: b"the same for all")
    kv = make_blocks()
    blocks = store(kv, NAMESPACE, [1, 1, 1, 1])
    assert match(kv, NAMESPACE, [1, 1, 1, 1, 0]) == blocks
    assert match(kv, NAMESPACE, [2, 2, 2, 2, 0]) == []
    assert store(kv, NAMESPACE, [2, 2, 2, 2]) != blocks
    assert match(kv, NAMESPACE, [1, 1, 1, 1, 0]) == blocks
    assert match(kv, dataclasses.replace(NAMESPACE, tenant_id="globex"), [1, 1, 1, 1, 0]) == []


def test_keys_depend_on_the_secret() -> None:
    ours, theirs = (PrefixHasher(SIZE, secret=secret * 32) for secret in (b"a", b"b"))
    fields = (NAMESPACE, ROOT_KEY, (1, 1, 1, 1))
    assert ours.key(*fields) == ours.key(*fields)
    assert ours.key(*fields) != theirs.key(*fields)


def test_a_key_is_the_keyed_hash_of_all_fields_with_their_lengths() -> None:
    secret, parent, token_ids = b"s" * 32, b"p" * 32, (70_000, 2, 3, 4)
    namespace = CacheNamespace("acme", "runtime", AdapterKey("acme", "sha256:1"), "label", 5, 7)
    tokens = b"tokens:" + b"".join(token.to_bytes(4, "little") for token in token_ids)
    for before in (ROOT_KEY, parent):
        fields = (namespace.encode(), b"parent:" + before, tokens)
        framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        expected = hashlib.blake2b(framed, key=secret, digest_size=32).digest()
        hasher = PrefixHasher(len(token_ids), secret=secret)
        assert hasher.key(namespace, before, token_ids) == expected


def test_a_chain_is_hashed_anew_from_where_its_tokens_or_namespace_differ() -> None:
    hasher = PrefixHasher(SIZE, secret=b"s" * 32)

    def last(chain: list[Prefix], namespace: CacheNamespace, *blocks: int) -> Prefix:
        tokens = [block for block in blocks for _ in range(SIZE)]
        return [hasher.prefix(chain, i, namespace, tokens) for i in range(len(blocks))][-1]

    chain: list[Prefix] = []
    other = dataclasses.replace(NAMESPACE, tenant_id="globex")
    for namespace, blocks in ((NAMESPACE, (1, 2, 3)), (NAMESPACE, (9, 2, 3)), (other, (9, 2, 3))):
        assert last(chain, namespace, *blocks) == last([], namespace, *blocks)


def test_a_block_published_anew_leaves_its_former_prefix_to_others() -> None:
    kv = make_blocks()
    cached, hasher = kv.groups[0].cached, PrefixHasher(SIZE, secret=b"s" * 32)
    first, second = (hasher.prefix([], 0, NAMESPACE, [token] * SIZE) for token in (1, 2))
    cached.publish(first, 7)
    cached.publish(second, 7)
    cached.publish(first, 8)
    assert (cached.find(first), cached.find(second)) == (8, 7)


def test_a_reused_block_is_no_longer_found() -> None:
    kv = make_blocks(num_usable=2)
    store(kv, NAMESPACE, [1, 1, 1, 1])
    assert kv.grow(kv.new_sequence(), 0, 2 * SIZE)
    assert match(kv, NAMESPACE, [1, 1, 1, 1, 0]) == []


def test_publishing_known_content_keeps_the_first_block() -> None:
    kv = make_blocks()
    first = store(kv, NAMESPACE, [1, 1, 1, 1])
    assert store(kv, NAMESPACE, [1, 1, 1, 1]) == first
    assert len(kv.groups[0].cached) == 1


def test_dropping_an_adapter_forgets_its_blocks_and_no_others() -> None:
    kv = make_blocks(num_usable=6)
    same_content = AdapterKey("globex", ADAPTER.digest)
    others = [
        dataclasses.replace(NAMESPACE, adapter=None),
        CacheNamespace("globex", "runtime", same_content),
    ]
    tokens = list(range(9))
    kept = [store(kv, other, tokens[:8]) for other in others]
    dropped = store(kv, NAMESPACE, tokens[:8])
    assert kv.drop_adapter(ADAPTER) == 2
    assert match(kv, NAMESPACE, tokens) == []
    assert sorted(store(kv, NAMESPACE, tokens[:8])) == sorted(dropped), "they are reused first"
    assert [match(kv, other, tokens) for other in others] == kept


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
