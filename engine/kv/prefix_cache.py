"""Prefix cache: reuses KV blocks that already hold the beginning of a prompt.

Torch-free. A block's key is a keyed BLAKE2b hash over tagged, length-prefixed fields: namespace
(tenant, runtime, adapter digest and start, rotary context), the parent block's key and the token
ids. Blocks before the adapter's start have the base's namespace, so all adapters of the tenant
share them. A hit also compares the stored token ids, so a collision is a miss and never a wrong
answer. Clients choose no more of the namespace than whether their requests may exceed a rotary
context, and by their prompts the adapter's start. Blocks are published only by `publish`, after the
step that wrote them, or when they are copied from the host.

Eviction is least recently used first, from the leaves: a cached block is dropped when its pool
reallocates it, a pool reallocates the block that was freed first, and a sequence frees its last
block first. With host memory, what is dropped is copied there under the same key (`HostSlots`). A
holder of a cached block also holds the cached blocks before it, because `publish` makes a sequence
that computed known content continue with the block that is already cached.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from .block_pool import BlockPool

ROOT_KEY = b""


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """The scope in which prefixes are shared: one tenant, base, adapter version, rotary context."""

    tenant_id: str
    runtime_id: str
    adapter: AdapterKey | None
    label: str = ""
    """Separates prefixes further; set by the platform, never by a client."""
    rotary_start: int = 0
    """The rotary context: keys of one are wrong in another. See `RotaryContexts.start`."""
    adapter_start: int = 0
    """The position of the first token that the adapter acts on."""

    def of_block(self, end: int) -> CacheNamespace:
        """The scope of the block that ends at this position: the base's, if the adapter acts on
        none of its tokens."""
        return self if end > self.adapter_start else _of_base(self)

    def encode(self) -> bytes:
        digest = self.adapter.digest if self.adapter else "base"
        return _encode_fields(
            b"v1",
            b"tenant:" + self.tenant_id.encode(),
            b"runtime:" + self.runtime_id.encode(),
            b"adapter:" + digest.encode(),
            b"label:" + self.label.encode(),
            b"rotary:%d" % self.rotary_start,
            b"start:%d" % self.adapter_start,
        )


class Prefix(NamedTuple):
    """The identity of one full block: its tokens and all tokens before it."""

    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    namespace: CacheNamespace


class PrefixHasher:
    """Computes the keys of prefixes. `secret` keys the hashes, so that a client cannot construct a
    collision."""

    def __init__(self, block_size: int, *, secret: bytes) -> None:
        self._block_size = block_size
        self._secret = secret
        tag = b"tokens:"
        self._tokens_head = (len(tag) + 4 * block_size).to_bytes(4, "little") + tag
        self._pack = struct.Struct(f"<{block_size}I").pack

    def prefix(
        self,
        chain: list[Prefix],
        index: int,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
    ) -> Prefix:
        """The prefix that ends with block `index` of these tokens.

        `chain` holds the prefixes before it and stores this one, so a sequence that is looked up
        again is not hashed again.
        """
        end = (index + 1) * self._block_size
        tokens = tuple(token_ids[index * self._block_size : end])
        namespace = namespace.of_block(end)
        if index < len(chain):
            known = chain[index]
            if known.token_ids == tokens and known.namespace == namespace:
                return known
            del chain[index:]
        parent = chain[index - 1].key if index else ROOT_KEY
        prefix = Prefix(self.key(namespace, parent, tokens), parent, tokens, namespace)
        chain.append(prefix)
        return prefix

    def key(self, namespace: CacheNamespace, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        head = _head(namespace, len(parent))
        fields = head + parent + self._tokens_head + self._pack(*token_ids)
        return hashlib.blake2b(fields, key=self._secret, digest_size=32).digest()


class CachedBlocks:
    """A pool's published blocks, by prefix. It holds no references: they may be free or held."""

    def __init__(self, pool: BlockPool) -> None:
        self.num_evictions = 0
        self.on_evict: Callable[[Prefix, int], None] | None = None
        """Called with a prefix and its block, just before the block is given other content."""
        self._pool = pool
        self._block_by_key: dict[bytes, int] = {}
        self._prefixes: dict[int, Prefix] = {}
        pool.on_reuse = self._evict

    def __len__(self) -> int:
        return len(self._prefixes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._prefixes

    @property
    def num_unheld(self) -> int:
        """Published blocks that no sequence holds."""
        return self._pool.count_free(self._prefixes.keys())

    def prefix_of(self, block_id: int) -> Prefix | None:
        return self._prefixes.get(block_id)

    def find(self, prefix: Prefix) -> int | None:
        block_id = self._block_by_key.get(prefix.key)
        if block_id is None or self._prefixes[block_id] != prefix:
            return None
        return block_id

    def publish(self, prefix: Prefix, block_id: int) -> int:
        """Publish a written block; return the block with which to continue.

        The first published block of a prefix is kept; the owner of a later one should switch to it.
        """
        if prefix.key in self._block_by_key:
            cached = self.find(prefix)
            return block_id if cached is None else cached
        self.forget(block_id)
        self._block_by_key[prefix.key] = block_id
        self._prefixes[block_id] = prefix
        return block_id

    def forget(self, block_id: int) -> bool:
        """Unpublish this block; False if it was not published."""
        prefix = self._prefixes.pop(block_id, None)
        if prefix is None:
            return False
        del self._block_by_key[prefix.key]
        return True

    def move(self, moves: Mapping[int, int]) -> None:
        """The content of each source is in its target from now on, which is not published."""
        for source, target in moves.items():
            if prefix := self._prefixes.pop(source, None):
                self._prefixes[target] = prefix
                self._block_by_key[prefix.key] = target

    def drop_adapter(self, adapter: AdapterKey) -> list[int]:
        """Unpublish all blocks of this adapter and of its compositions; returns them."""
        gone = [
            block_id
            for block_id, prefix in self._prefixes.items()
            if (own := prefix.namespace.adapter) is not None and own.has_part(adapter)
        ]
        for block_id in gone:
            self.forget(block_id)
            self._pool.forget(block_id)
        return gone

    def check_integrity(self) -> None:
        assert self._block_by_key == {
            prefix.key: block_id for block_id, prefix in self._prefixes.items()
        }, "keys and cached blocks disagree"

    def _evict(self, block_id: int) -> None:
        prefix = self.prefix_of(block_id)
        if prefix is None:
            return
        self.forget(block_id)
        self.num_evictions += 1
        if self.on_evict:
            self.on_evict(prefix, block_id)


@lru_cache(maxsize=1024)
def _of_base(namespace: CacheNamespace) -> CacheNamespace:
    return replace(namespace, adapter=None, adapter_start=0)


@lru_cache(maxsize=1024)
def _head(namespace: CacheNamespace, num_parent_bytes: int) -> bytes:
    """The encoded fields before the parent's key, as for every block of a sequence."""
    tag = b"parent:"
    length = (len(tag) + num_parent_bytes).to_bytes(4, "little")
    return _encode_fields(namespace.encode()) + length + tag


def _encode_fields(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
