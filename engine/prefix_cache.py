"""Reuse of KV blocks that already hold a prompt's beginning.

Torch-free. A block's key is a keyed BLAKE2b hash over tagged, length-prefixed fields: namespace
(tenant, runtime, adapter digest), the parent block's key and the token ids. A hit also compares
the stored token ids, so a collision costs a miss and never a wrong answer. Clients have no say in
the namespace, and blocks are published only by `publish`, after the step that wrote them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..adapters.identity import AdapterKey
from .block_pool import BlockPool

ROOT_KEY = b""


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """Within which prefixes may meet: never across tenants, bases or adapter versions."""

    tenant_id: str
    runtime_id: str
    adapter: AdapterKey | None
    label: str = ""
    """Narrows further; set by the platform, never by a client."""

    def encode(self) -> bytes:
        digest = self.adapter.digest if self.adapter else "base"
        return _encode_fields(
            b"v1",
            b"tenant:" + self.tenant_id.encode(),
            b"runtime:" + self.runtime_id.encode(),
            b"adapter:" + digest.encode(),
            b"label:" + self.label.encode(),
        )


@dataclass(frozen=True, slots=True)
class _CachedBlock:
    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    namespace: CacheNamespace


class PrefixCache:
    """Full blocks by key. Holds no references itself: a cached block may be free or shared."""

    def __init__(self, pool: BlockPool, block_size: int, *, secret: bytes) -> None:
        """`secret` keys the hashes, so that no outsider can construct a collision."""
        self._pool = pool
        self._block_size = block_size
        self._secret = secret
        self._block_by_key: dict[bytes, int] = {}
        self._cached: dict[int, _CachedBlock] = {}
        pool.on_reuse = self._forget

    def match(self, namespace: CacheNamespace, token_ids: Sequence[int]) -> tuple[list[int], bytes]:
        """Share the longest cached prefix of full blocks, at least one token short of the whole.

        Returns its blocks, which the caller now holds, and the key of the last one.
        """
        encoded = namespace.encode()
        key = ROOT_KEY
        block_ids: list[int] = []
        for start in range(0, len(token_ids) - self._block_size, self._block_size):
            tokens = tuple(token_ids[start : start + self._block_size])
            candidate = self._key(encoded, key, tokens)
            block_id = self._block_by_key.get(candidate)
            if block_id is None:
                break
            cached = self._cached[block_id]
            if (cached.token_ids, cached.parent, cached.namespace) != (tokens, key, namespace):
                break
            block_ids.append(block_id)
            key = candidate
        self._pool.share(block_ids)
        return block_ids, key

    def publish(
        self, namespace: CacheNamespace, parent: bytes, token_ids: Sequence[int], block_id: int
    ) -> bytes:
        """Offer a written block to others; return its key. The first block of a key stays."""
        tokens = tuple(token_ids)
        key = self._key(namespace.encode(), parent, tokens)
        if key not in self._block_by_key:
            self._forget(block_id)
            self._block_by_key[key] = block_id
            self._cached[block_id] = _CachedBlock(key, parent, tokens, namespace)
        return key

    def drop_adapter(self, adapter: AdapterKey) -> int:
        """Forget everything computed under this adapter; return how many blocks that was."""
        gone = [
            block_id
            for block_id, cached in self._cached.items()
            if cached.namespace.adapter == adapter
        ]
        for block_id in gone:
            self._forget(block_id)
            self._pool.forget(block_id)
        return len(gone)

    def __len__(self) -> int:
        return len(self._cached)

    def _forget(self, block_id: int) -> None:
        cached = self._cached.pop(block_id, None)
        if cached:
            del self._block_by_key[cached.key]

    def _key(self, namespace: bytes, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        tokens = b"".join(token.to_bytes(4, "little") for token in token_ids)
        fields = _encode_fields(namespace, b"parent:" + parent, b"tokens:" + tokens)
        return hashlib.blake2b(fields, key=self._secret, digest_size=32).digest()


def _encode_fields(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
