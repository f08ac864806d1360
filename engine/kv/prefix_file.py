"""A file of encrypted KV blocks: the prefixes of one KV group, a slot for each.

The headers of all slots stand at the beginning. A header has a random key for the content of its
slot and the identity of the prefix, encrypted under the key of its tenant and adapter and bound to
the tier's identity, the group and the slot. A slot that was written in part, or whose header is of
another write, cannot be decrypted. So nothing has to be written in order, and nothing is synced: a
torn write is a miss. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ...adapters.durable import take_room
from ...adapters.identity import AdapterKey, Member
from ...adapters.wiping import wipe
from .prefix_cache import CacheNamespace, Prefix
from .prefix_keys import KEY_BYTES, NONCE_BYTES

HEADER_BYTES = 2048
PIECE_BYTES = 256 << 10
"""Of a block, encrypted at once: the interpreter runs nothing else meanwhile."""
TAG_BYTES = 16
_NAME_BYTES = 16
_HASH_BYTES = 32
_FIXED = struct.Struct(f"<Q{KEY_BYTES}s{_HASH_BYTES}sB{_HASH_BYTES}sHH")
"""Time of the write, content key, prefix key, whether there is a parent, its key, number of tokens,
bytes of the namespace."""


class Header(NamedTuple):
    written_at: int
    """In ns since 1970."""
    content_key: bytes
    prefix: Prefix


class PrefixFile:
    """One thread uses it. Each method raises OSError if the disk fails."""

    def __init__(self, path: Path, *, num_slots: int, block_bytes: int, identity: bytes) -> None:
        """Take the room on the disk. `identity`: of the KV and of the group; what was written under
        another one is not found."""
        self.block_bytes = block_bytes
        self.num_slots = num_slots
        self._identity = identity
        self._stride = file_bytes_per_slot(block_bytes) - HEADER_BYTES
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take_room(self._descriptor, self.num_bytes)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def num_bytes(self) -> int:
        return self.num_slots * file_bytes_per_slot(self.block_bytes)

    def close(self) -> None:
        os.close(self._descriptor)

    def write(
        self,
        slot: int,
        prefix: Prefix,
        content: memoryview,
        *,
        key_name: str,
        key: bytes,
        written_at: int,
        pause: Callable[[], None],
    ) -> bool:
        """Write a block; False if its identity is too long for a header. `pause` is called between
        pieces of work."""
        content_key = os.urandom(KEY_BYTES)
        header = self._seal(slot, Header(written_at, content_key, prefix), key_name, key)
        if header is None:
            return False
        cipher, start = AESGCM(content_key), self._start(slot)
        for number, first in enumerate(range(0, self.block_bytes, PIECE_BYTES)):
            sealed = cipher.encrypt(_nonce(number), content[first : first + PIECE_BYTES], None)
            _write_all(self._descriptor, sealed, start)
            start += len(sealed)
            pause()
        _write_all(self._descriptor, header, slot * HEADER_BYTES)
        return True

    def read(
        self, slot: int, prefix: Prefix, put: Callable[[int, bytes], None], *, key: bytes
    ) -> bool:
        """Call `put` with the offset and the bytes of each piece of a block; False if the slot does
        not have this prefix as it was written. What was put is then useless."""
        sealed = os.pread(self._descriptor, HEADER_BYTES, slot * HEADER_BYTES)
        header = self._open(slot, sealed, key)
        if header is None or header.prefix != prefix:
            return False
        cipher, start = AESGCM(header.content_key), self._start(slot)
        for number, first in enumerate(range(0, self.block_bytes, PIECE_BYTES)):
            num_bytes = min(PIECE_BYTES, self.block_bytes - first) + TAG_BYTES
            sealed = os.pread(self._descriptor, num_bytes, start)
            start += num_bytes
            try:
                piece = cipher.decrypt(_nonce(number), sealed, None)
            except (InvalidTag, ValueError):
                return False
            put(first, piece)
            wipe(piece)
        return True

    def headers(self, keys: Mapping[bytes, bytes]) -> Iterator[tuple[int, Header]]:
        """Those that can be read with these keys, by the hashes of their names, and their slots."""
        count = max((4 << 20) // HEADER_BYTES, 1)
        for first in range(0, self.num_slots, count):
            num_slots = min(count, self.num_slots - first)
            data = os.pread(self._descriptor, num_slots * HEADER_BYTES, first * HEADER_BYTES)
            for index in range(num_slots):
                sealed = data[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
                key = keys.get(sealed[:_NAME_BYTES])
                header = None if key is None else self._open(first + index, sealed, key)
                if header is not None:
                    yield first + index, header

    def _start(self, slot: int) -> int:
        return self.num_slots * HEADER_BYTES + slot * self._stride

    def _context(self, slot: int) -> bytes:
        return self._identity + slot.to_bytes(8, "little")

    def _seal(self, slot: int, header: Header, key_name: str, key: bytes) -> bytes | None:
        content = _encode(header)
        room = HEADER_BYTES - _NAME_BYTES - NONCE_BYTES - TAG_BYTES
        if content is None or len(content) > room:
            return None
        nonce = os.urandom(NONCE_BYTES)
        sealed = AESGCM(key).encrypt(nonce, content.ljust(room, b"\0"), self._context(slot))
        return name_hash(key_name) + nonce + sealed

    def _open(self, slot: int, sealed: bytes, key: bytes) -> Header | None:
        nonce = sealed[_NAME_BYTES : _NAME_BYTES + NONCE_BYTES]
        try:
            content = AESGCM(key).decrypt(
                nonce, sealed[_NAME_BYTES + NONCE_BYTES :], self._context(slot)
            )
        except (InvalidTag, ValueError):
            return None
        return _decode(content)


def file_bytes_per_slot(block_bytes: int) -> int:
    """Bytes of a file for each block."""
    return HEADER_BYTES + block_bytes + TAG_BYTES * -(-block_bytes // PIECE_BYTES)


def name_hash(key_name: str) -> bytes:
    """What stands in a header for the name of its key."""
    return hashlib.sha256(key_name.encode()).digest()[:_NAME_BYTES]


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "little")  # the key is of this write alone


def _encode(header: Header) -> bytes | None:
    """None: too long."""
    prefix = header.prefix
    own = prefix.namespace
    adapter = None
    if own.adapter is not None:
        members = [(member.digest, member.weight) for member in own.adapter.members]
        adapter = [own.adapter.tenant_id, own.adapter.digest, members]
    fields = [
        own.tenant_id,
        own.runtime_id,
        adapter,
        own.label,
        own.rotary_start,
        own.adapter_start,
    ]
    namespace = json.dumps(fields, separators=(",", ":")).encode()
    if len(namespace) > HEADER_BYTES:
        return None
    fixed = _FIXED.pack(
        header.written_at,
        header.content_key,
        prefix.key,
        bool(prefix.parent),
        prefix.parent.ljust(_HASH_BYTES, b"\0"),
        len(prefix.token_ids),
        len(namespace),
    )
    return fixed + namespace + np.array(prefix.token_ids, dtype="<u4").tobytes()


def _decode(content: bytes) -> Header:
    written_at, content_key, key, has_parent, parent, num_tokens, num_bytes = _FIXED.unpack_from(
        content
    )
    start = _FIXED.size + num_bytes
    tenant_id, runtime_id, adapter, *others = json.loads(content[_FIXED.size : start])
    if adapter is not None:
        owner, digest, members = adapter
        adapter = AdapterKey(owner, digest, tuple(Member(*member) for member in members))
    token_ids = tuple(np.frombuffer(content, "<u4", num_tokens, start).tolist())
    namespace = CacheNamespace(tenant_id, runtime_id, adapter, *others)
    prefix = Prefix(key, parent if has_parent else b"", token_ids, namespace)
    return Header(written_at, content_key, prefix)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
