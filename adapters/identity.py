"""The identity of an adapter version: its tenant and the digest of its content.

Names, versions and aliases are pointers in the control plane. Everything that holds weights, KV
blocks, leases or counters uses the `AdapterKey`, so entries cannot be stale or confused between
tenants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

DIGEST_PREFIX = "sha256:"


class AdapterKey(NamedTuple):
    """Identity of one immutable adapter version within its tenant."""

    tenant_id: str
    digest: str
    """`sha256:` and 64 hex digits."""


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


def _update(hasher: hashlib._Hash, tag: bytes, value: bytes) -> None:
    for field in (tag, value):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
