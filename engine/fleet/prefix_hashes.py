"""Hashes of a prompt's first blocks, by which the router knows a prefix again."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

from ..messages import GenerationRequest

BLOCK_TOKENS = 64
MAX_BLOCKS = 16
"""1,024 tokens: computing them is what a replica that knows them saves."""


def prefix_hashes(request: GenerationRequest) -> list[bytes]:
    """Chained hashes of the full blocks, none of a prompt that is shorter than one.

    Equal hashes mean an equal tenant and namespace, equal tokens from the start, and an equal
    adapter, unless all these tokens are before the adapter's start.
    """
    return list(_chain(request))


def _chain(request: GenerationRequest) -> Iterator[bytes]:
    last = repr((request.tenant_id, request.cache_namespace)).encode()
    tokens = request.prompt_token_ids
    num_blocks = min(len(tokens) // BLOCK_TOKENS, MAX_BLOCKS)
    for start in range(0, num_blocks * BLOCK_TOKENS, BLOCK_TOKENS):
        block = array("Q", tokens[start : start + BLOCK_TOKENS]).tobytes()
        adapter = repr(_adapter_before(request, start + BLOCK_TOKENS)).encode()
        last = blake2b(last + adapter + block, digest_size=16).digest()
        yield last


def _adapter_before(request: GenerationRequest, end: int) -> str | None:
    """The digest of the adapter that acts on any of the tokens up to a position."""
    start = request.adapter_start
    if request.adapter is None or start is None or end <= start:
        return None
    return request.adapter.digest
