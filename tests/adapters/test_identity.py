"""The digest of an adapter: the same for ever, since stored adapters have it."""

from __future__ import annotations

import hashlib

from loraplex.adapters.identity import TensorDigest, adapter_digest


def test_a_digest_is_that_of_the_tagged_fields_with_their_lengths() -> None:
    tensors = [
        TensorDigest("b", "F32", (2, 3), b"\1" * 32),
        TensorDigest("a", "F16", (4,), b"\2" * 32),
    ]
    fields = [
        *(b"loraplex adapter v1", b"", b"base", b"the base", b"config", b'{"r":[2],"z":null}'),
        *(b"tensor", b'["a", "F16", [4]]', b"bytes", b"\2" * 32),
        *(b"tensor", b'["b", "F32", [2, 3]]', b"bytes", b"\1" * 32),
    ]
    encoded = b"".join(bytes([len(field)]) + bytes(7) + field for field in fields)
    digest = adapter_digest(tensors, {"z": None, "r": [2]}, "the base")
    assert digest == "sha256:" + hashlib.sha256(encoded).hexdigest()
