"""The digest of an adapter: the same for ever, since stored adapters have it."""

from __future__ import annotations

import hashlib

from loraplex.adapters.identity import (
    AdapterKey,
    Member,
    TensorDigest,
    adapter_digest,
    composed_key,
)

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def test_a_compositions_digest_is_that_of_its_members_by_digest_and_their_weights() -> None:
    key = composed_key("acme", {B: 2.0, A: -0.5})
    fields = [
        *(
            b"loraplex composition v1",
            b"",
            b"member",
            A.encode(),
            b"weight",
            b"-0x1.0000000000000p-1",
        ),
        *(b"member", B.encode(), b"weight", b"0x1.0000000000000p+1"),
    ]
    encoded = b"".join(bytes([len(field)]) + bytes(7) + field for field in fields)
    assert key == AdapterKey(
        "acme", "sha256:" + hashlib.sha256(encoded).hexdigest(), (Member(A, -0.5), Member(B, 2.0))
    )
    assert key.parts == (AdapterKey("acme", A), AdapterKey("acme", B))


def test_the_order_and_the_spelling_of_a_composition_do_not_matter() -> None:
    assert composed_key("acme", {A: 0.0, B: 1}) == composed_key("acme", {B: 1.0, A: -0.0})
    digests = {
        composed_key("acme", weights).digest
        for weights in ({A: 1.0, B: 0.5}, {A: 0.5, B: 1.0}, {A: 1.0, B: 0.25}, {A: 0.5}, {B: 0.5})
    }
    assert len(digests) == 5


def test_one_member_of_weight_one_is_the_adapter() -> None:
    assert composed_key("acme", {A: 1.0}) == AdapterKey("acme", A)
    assert AdapterKey("acme", A).parts == (AdapterKey("acme", A),)


def test_only_a_tenants_own_compositions_have_an_adapter_as_part() -> None:
    key = composed_key("acme", {A: 1.0, B: 0.5})
    assert key.has_part(AdapterKey("acme", A))
    assert key.has_part(key)
    assert not key.has_part(AdapterKey("globex", A))
    assert not AdapterKey("acme", A).has_part(key)


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
