"""The identity of an adapter version: its tenant and the digest of its content.

Names, versions and aliases are pointers in the control plane. Everything that holds weights, KV
blocks, leases or counters uses the `AdapterKey`, so entries cannot be stale or confused between
tenants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

DIGEST_PREFIX = "sha256:"


class Member(NamedTuple):
    """One adapter version of a composition."""

    digest: str
    weight: float
    """The factor of its delta."""


class AdapterKey(NamedTuple):
    """Identity of one immutable adapter version within its tenant, or of a composition of several.

    The key of a composition says what it is made of, so no layer keeps a table of compositions.
    """

    tenant_id: str
    digest: str
    """`sha256:` and 64 hex digits."""
    members: tuple[Member, ...] = ()
    """Of a composition, by digest; empty for an adapter version."""

    @property
    def parts(self) -> tuple[AdapterKey, ...]:
        """The adapter versions whose blocks make its weights: itself, or its members."""
        if not self.members:
            return (self,)
        return tuple(AdapterKey(self.tenant_id, member.digest) for member in self.members)

    def has_part(self, key: AdapterKey) -> bool:
        """Whether it is `key` or a composition of it."""
        return self == key or (bool(self.members) and key in self.parts)


class TensorDigest(NamedTuple):
    """One tensor of the adapter in its original form."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: bytes


def adapter_digest(tensors: Iterable[TensorDigest], config: dict[str, object], base_id: str) -> str:
    """Digest of an adapter: its original tensors, canonical config and the base it is bound to.

    Fields are tagged and length-prefixed, so no two different inputs encode alike. The order of
    tensors in the file does not matter.
    """
    encoded_config = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    hasher = hashlib.sha256()
    _update(hasher, b"loraplex adapter v1", b"")
    _update(hasher, b"base", base_id.encode())
    _update(hasher, b"config", encoded_config)
    for tensor in sorted(tensors):
        header = json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode()
        _update(hasher, b"tensor", header)
        _update(hasher, b"bytes", tensor.sha256)
    return DIGEST_PREFIX + hasher.hexdigest()


def composed_key(tenant_id: str, weights: Mapping[str, float]) -> AdapterKey:
    """The key of a composition; `weights` by the digests of its members, all of this tenant.

    Neither the order of the members nor the spelling of a weight matters. One member of weight 1
    is that adapter itself.
    """
    members = tuple(Member(digest, weight + 0.0) for digest, weight in sorted(weights.items()))
    if len(members) == 1 and members[0].weight == 1.0:
        return AdapterKey(tenant_id, members[0].digest)
    hasher = hashlib.sha256()
    _update(hasher, b"loraplex composition v1", b"")
    for member in members:
        _update(hasher, b"member", member.digest.encode())
        _update(hasher, b"weight", member.weight.hex().encode())
    return AdapterKey(tenant_id, DIGEST_PREFIX + hasher.hexdigest(), members)


def _update(hasher: hashlib._Hash, tag: bytes, value: bytes) -> None:
    for field in (tag, value):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
