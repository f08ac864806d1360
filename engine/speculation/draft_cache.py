"""The draft model's KV cache: the computed tokens of each request, and their blocks. Torch-free.

It is only a cache: entries without room are dropped and recomputed when needed. Prefixes of prompts
are shared, so that a system prompt or the members of a group are computed once. A draft model runs
without adapters, so all of a tenant's adapters share the prefixes. Generated tokens are not kept
beyond their request, so they never outlive their adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ..draft import NO_DRAFT, Draft
from ..kv.blocks import KvBlocks
from ..kv.layout import KvGroup, KvOperation
from ..kv.prefix_cache import CacheNamespace
from ..kv.sequence_blocks import BlockTable, SequenceBlocks
from ..model.rope import RotaryContexts
from ..request import Request

Move = Callable[[Sequence[BlockTable], Sequence[int], Sequence[int]], None]
"""Copies the entries of places to other ones: see `KvCache.move`."""


def _no_move(*_: object) -> None:
    raise AssertionError("no trees are kept")


@dataclass(eq=False, slots=True)
class CachedSequence:
    """One request's part of the draft model's cache."""

    namespace: CacheNamespace
    blocks: SequenceBlocks
    num_computed: int = 0
    """The number of tokens whose keys and values are computed."""
    drafted: Draft = NO_DRAFT
    """The last of them, in its order: those that were right are the request's own."""

    @property
    def tables(self) -> list[BlockTable]:
        return self.blocks.tables

    def hold(self, drafted: Draft) -> None:
        """Draft tokens have been computed, in this order, behind the others."""
        self.drafted = drafted
        self.num_computed += len(drafted)


class DraftCache:
    """The draft model's blocks by request; the least recently used request is evicted first."""

    def __init__(
        self,
        group: KvGroup,
        block_size: int,
        *,
        rotary_contexts: RotaryContexts,
        prefix_secret: bytes | None,
        move: Move = _no_move,
    ) -> None:
        """`group`: all layers, without a window, because draft tokens are rolled back.
        `rotary_contexts`: the draft model's own. `move`: of the pages; needed for trees that are
        kept.

        `prefix_secret` keys the hashes of shared prompts; None: nothing is shared.
        """
        self._kv = KvBlocks([group], block_size, prefix_secret=prefix_secret)
        self._rotary_contexts = rotary_contexts
        self._move = move
        self._sequences: OrderedDict[str, CachedSequence] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def settle(self, request: Request) -> CachedSequence:
        """The request's cached sequence, marked as used, truncated to the request's present tokens.

        At least the last token is not computed, because the next one is predicted from it. Keys and
        values of a tree's tokens that were right are moved to their positions, by `move`.
        """
        sequence = self._sequences.get(request.request_id) or self._begin(request)
        self._sequences.move_to_end(request.request_id)
        num_known = sequence.num_computed - len(sequence.drafted)
        end = min(sequence.num_computed, len(request.token_ids) - 1)
        path = sequence.drafted.matched(request.token_ids[num_known:end])
        sequence.num_computed = min(num_known + len(path), len(request.token_ids) - 1)
        sequence.drafted = NO_DRAFT
        if path != list(range(len(path))):
            targets = range(num_known, num_known + len(path))
            self._move(sequence.tables, [num_known + index for index in path], targets)
        return sequence

    def can_hold(self, num_tokens: int) -> bool:
        """Whether there is room for a single request with this many tokens."""
        return self._kv.fits_alone(num_tokens, num_tokens)

    def reserve(self, request_id: str, num_tokens: int, keep: Collection[str]) -> bool:
        """Make the next `num_tokens` of the request writable; False if there is no room.

        Other requests are evicted for it, except those in `keep`.
        """
        sequence = self._sequences[request_id]
        while not self._kv.grow(sequence.blocks, sequence.num_computed, num_tokens):
            others = (key for key in self._sequences if key != request_id and key not in keep)
            victim = next(others, None)
            if victim is None:
                return False
            self.drop(victim)
        return True

    def advance(self, request: Request, num_tokens: int) -> None:
        """The request's next `num_tokens` have been computed; publish the full blocks of its
        prompt."""
        sequence = self._sequences[request.request_id]
        sequence.num_computed += num_tokens
        if sequence.num_computed - num_tokens < request.num_prompt_tokens:
            self._kv.advance(
                sequence.blocks,
                sequence.namespace,
                request.token_ids,
                min(sequence.num_computed, request.num_prompt_tokens),
            )

    def drop(self, request_id: str) -> None:
        """Evict the request's blocks; unknown requests are ignored."""
        if sequence := self._sequences.pop(request_id, None):
            self._kv.release(sequence.blocks)

    def take_operations(self) -> list[KvOperation]:
        """The operations on tensors before the next forward pass, in this order."""
        return self._kv.operations.take()

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free(0)

    @property
    def num_blocks(self) -> int:
        return self._kv.num_usable(0)

    def check_integrity(self) -> None:
        """Assert that every block is free or held by exactly the sequences that are here."""
        self._kv.check_integrity(sequence.blocks for sequence in self._sequences.values())

    def _begin(self, request: Request) -> CachedSequence:
        rotary_start = self._rotary_contexts.start(request.max_num_tokens)
        namespace = replace(
            request.namespace, adapter=None, adapter_start=0, rotary_start=rotary_start
        )
        sequence = CachedSequence(namespace, self._kv.new_sequence())
        sequence.num_computed = self._kv.match(
            sequence.blocks, namespace, request.token_ids[: request.num_prompt_tokens]
        )
        self._sequences[request.request_id] = sequence
        return sequence
