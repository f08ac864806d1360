"""The KV blocks of every sequence: the scheduler's view of KV memory. Torch-free.

The bookkeeping happens at once. The operations on tensors are queued and executed before the next
forward pass. So a block may be assigned before it is zeroed, copied or filled, but it is not read
before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from ...adapters.identity import AdapterKey
from .disk_tier import DiskTier, Place, Store
from .eviction import NEVER, EvictionPlan
from .group_blocks import GroupBlocks
from .layout import STATE_WINDOW, KvGroup, OperationLog, num_blocks_for
from .prefix_cache import CacheNamespace
from .sequence_blocks import SequenceBlocks
from .shared_prefixes import SharedPrefixes
from .state_blocks import StateBlocks

PaysToFetch = Callable[[int, Sequence[int]], bool]
"""Whether to copy so many blocks per group from the host, or to read them from the disk, rather
than to compute so many tokens."""


class BegunRead(NamedTuple):
    """What is being read for a request."""

    places: list[Place]
    num_tokens: int
    """Those that need not be computed then."""


class KvBlocks:
    """Allocates blocks in all groups, or in none."""

    def __init__(
        self,
        groups: Sequence[KvGroup],
        block_size: int,
        *,
        prefix_secret: bytes | None,
        num_swap_slots: Sequence[int] = (),
        num_open_slots: int | None = None,
        tenant_cap: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix_secret` keys the prefix cache's hashes; None: no prefix cache.

        `num_swap_slots`: host slots per group; empty: nothing is swapped or cached on the host.
        `num_open_slots`: the slots per group for blocks that may be written, if complete blocks are
        quantized (`OpenSlots`). `tenant_cap`: the part of the host slots beyond which a tenant's
        prefixes displace its own. `clock`: the time by which `held_seconds` of sequences count.
        """
        slots = tuple(num_swap_slots) or (0,) * len(groups)
        self.block_size = block_size
        self._tenant_cap = tenant_cap
        self.disk: DiskTier | None = None
        """None: no prefix goes to the disk."""
        self.operations = OperationLog()
        """What the tensors have to do before the next forward."""
        self.groups = tuple(
            StateBlocks(
                index,
                layout,
                block_size,
                num_swap_slots=count,
                operations=self.operations,
                clock=clock,
                tenant_cap=tenant_cap,
            )
            if layout.holds_states
            else GroupBlocks(
                index,
                layout,
                block_size,
                num_swap_slots=count,
                operations=self.operations,
                clock=clock,
                num_open_slots=num_open_slots,
                tenant_cap=tenant_cap,
            )
            for index, (layout, count) in enumerate(zip(groups, slots, strict=True))
        )
        self.num_fetched_tokens = 0
        """Those of prefixes that were copied from the host instead of computed."""
        self.num_lost_blocks = 0
        """Blocks of prefixes that are computed again, and were among the groups' `ghosts`."""
        self.num_lost_host_tokens = 0
        """Tokens that are computed again, and that somewhat more slots would have held."""
        self.holds_states = any(group.holds_states for group in groups)
        """Whether no step may compute tokens of an unfinished block together with others."""
        self._has_open_blocks = num_open_slots is not None
        self._windowed = tuple(group for group in self.groups if group.layout.window is not None)
        self._changes_at_blocks = all(group.layout.holds_states for group in self._windowed)
        self._prefixes = (
            SharedPrefixes(self.groups, block_size, secret=prefix_secret) if prefix_secret else None
        )

    def use_disk(self, store: Store, num_slots: Sequence[int], block_bytes: Sequence[int]) -> None:
        """Write published blocks to this store too, and find what it has. Only with a prefix cache
        and host slots. `num_slots`, `block_bytes`: per group."""
        assert self._prefixes is not None, "without a prefix cache nothing is published"
        self.disk = DiskTier(
            self.groups,
            self.operations,
            store,
            num_slots,
            block_bytes,
            tenant_cap=self._tenant_cap,
        )
        for group in self.groups:
            group.disk = self.disk
        self.operations.before_take = self.disk.spill

    # --- a sequence's way -------------------------------------------------------------------------

    def new_sequence(
        self, eviction: EvictionPlan | None = None, *, slides_at: int = NEVER
    ) -> SequenceBlocks:
        """`eviction`: only if no group has a window and blocks are never quantized together.
        `slides_at`: see `SequenceBlocks`; only if every group has a window, none in chunks."""
        return SequenceBlocks.empty(len(self.groups), eviction, slides_at=slides_at)

    def match(
        self,
        seq: SequenceBlocks,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        pays: PaysToFetch = lambda num_tokens, num_blocks: True,
    ) -> int:
        """Share the longest cached prefix, at most all tokens but one; returns its number of
        tokens.

        The sequence must be empty. What the host alone has counts if it `pays` to copy it: `grow`
        does, and until then the sequence is swapped.
        """
        assert not len(seq.tables[0]), "only an empty sequence can take over a prefix"
        if self._prefixes is None:
            return 0
        num_blocks = self._prefixes.longest_hit(seq.chain, namespace, token_ids)
        if any(self.host_counts):
            longest = self._prefixes.longest_hit(seq.chain, namespace, token_ids, on_host=True)
            num_tokens = (longest - num_blocks) * self.block_size
            prefixes = seq.chain[:longest]
            if num_tokens and pays(num_tokens, [g.num_to_fetch(prefixes) for g in self.groups]):
                num_blocks, seq.num_to_fetch = longest, num_tokens
        lost = self._prefixes.take_ghosts(seq.chain, namespace, token_ids, num_blocks)
        self.num_lost_blocks += lost.num_on_device
        self.num_lost_host_tokens += lost.num_on_host * self.block_size
        for group in self.groups:
            group.take_prefix(seq, seq.chain[:num_blocks])
            if self.disk is not None:
                self.disk.touch(group.index, seq.chain[:num_blocks])
        seq.num_published = num_blocks
        return num_blocks * self.block_size

    def read_from_disk(
        self,
        seq: SequenceBlocks,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        pays: PaysToFetch,
    ) -> BegunRead:
        """Begin to read into host slots what the disk alone has of the longest cached prefix, if it
        `pays`. The sequence must be empty."""
        if self._prefixes is None or self.disk is None or not self.disk.used_bytes:
            return BegunRead([], 0)
        find = partial(self._prefixes.longest_hit, seq.chain, namespace, token_ids, on_host=True)
        near, longest = find(), find(on_disk=True)
        num_tokens = (longest - near) * self.block_size
        to_read = [group.to_read(seq.chain[:longest]) for group in self.groups]
        if not num_tokens or not pays(num_tokens, list(map(len, to_read))):
            return BegunRead([], 0)
        places = []
        for group, prefixes in enumerate(to_read):
            for prefix in prefixes:
                if (place := self.disk.read(group, prefix)) is None:
                    break  # the host is full: the beginning of the prefix is of use too
                places.append(place)
        return BegunRead(places, num_tokens)

    def cached_blocks(
        self, seq: SequenceBlocks, namespace: CacheNamespace, token_ids: Sequence[int]
    ) -> list[dict[int, int]]:
        """What another engine needs of the longest prefix of these tokens that the device has
        cached: per group its blocks, by table index."""
        if self._prefixes is None:
            return [{} for _ in self.groups]
        num_blocks = self._prefixes.longest_hit(seq.chain, namespace, token_ids)
        return [group.cached_blocks(seq.chain[:num_blocks]) for group in self.groups]

    def store_on_host(
        self,
        seq: SequenceBlocks,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        group: int,
        indices: Sequence[int],
    ) -> list[int | None]:
        """Cache blocks of the prefix of these tokens on the host; the caller fills their slots
        before the next operation. None: the block is cached, or there is no room. No slot is named
        twice, although a later block may displace an earlier one."""
        if self._prefixes is None:
            return [None] * len(indices)
        prefixes = [self._prefixes.key_of(seq.chain, namespace, token_ids, i) for i in indices]
        host = self.groups[group].host
        slots = [host.store(prefix) for prefix in prefixes]
        return [
            slot if slot == host.find(prefix) else None
            for slot, prefix in zip(slots, prefixes, strict=True)
        ]

    def fork(self, parent: SequenceBlocks, child: SequenceBlocks, num_tokens: int) -> bool:
        """Let `child` share the parent's blocks of the first `num_tokens`, copied on write.

        Both have the same namespace and the same first tokens, which are computed. Returns False,
        without effect, if the parent is swapped out, has freed blocks that the child's windows
        need, has evicted tokens, or has completed the block in which the child begins.
        """
        assert not len(child.tables[0]), "only an empty sequence can become a fork"
        if (
            parent.is_swapped
            or parent.num_evicted
            or not all(group.can_fork(parent, num_tokens) for group in self.groups)
        ):
            return False
        for group in self.groups:
            group.fork(parent, child, num_tokens)
        parent.num_writable = 0
        num_full = num_tokens // self.block_size
        child.num_published = min(parent.num_published, num_full)
        child.chain = parent.chain[:num_full]
        return True

    def num_missing(
        self, seq: SequenceBlocks, num_computed: int, num_tokens: int, chunk: int | None = None
    ) -> tuple[int, ...]:
        """The free blocks needed per group to compute `num_tokens` more.

        Includes copies on write and swapping in. `chunk`: the maximum number of tokens per step,
        between which windows free blocks; None: one step.
        """
        return tuple(
            group.num_missing(seq, num_computed, num_tokens, chunk) for group in self.groups
        )

    def grow(self, seq: SequenceBlocks, num_computed: int, num_tokens: int) -> bool:
        """Make `num_tokens` more tokens writable in all groups; False, without effect, if blocks
        are short."""
        if num_computed + num_tokens <= seq.num_writable:
            return True
        assert num_computed + num_tokens <= seq.compacts_at, "the cache is compacted before"
        for group in self.groups:
            if group.num_missing(seq, num_computed, num_tokens) > group.pool.num_free:
                return False
            if not group.can_open(seq, num_computed, num_tokens):
                return False
        if seq.is_swapped:
            self._swap_in(seq)
        for group in self.groups:
            group.grow(seq, num_computed, num_tokens)
        if num_computed + num_tokens == seq.compacts_at and not seq.targets:
            seq.targets = [group.allocate_targets(seq) for group in self.groups]
        seq.num_writable = self._num_writable(seq)
        return True

    def _num_writable(self, seq: SequenceBlocks) -> int:
        """The token with which the cache is compacted may be written once the targets exist."""
        num_writable = len(seq.tables[0]) * self.block_size + seq.num_evicted
        return min(num_writable, seq.compacts_at if seq.targets else seq.compacts_at - 1)

    def advance(
        self,
        seq: SequenceBlocks,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        num_computed: int,
    ) -> None:
        """After the step: close and publish the blocks that it filled, and free those outside the
        windows, or those that it compacted.

        `token_ids` must be final up to `num_computed`.
        """
        num_cached = num_computed - seq.num_evicted
        num_full = num_cached // self.block_size
        for group in self.groups:
            group.close(seq, num_full)
        if self._prefixes is not None and not seq.num_evicted:
            self._prefixes.publish(seq, namespace, token_ids, num_full)
        for group in self._windowed:
            group.leave_behind(seq, num_cached)
        if num_cached >= seq.slides_at:
            self._slide(seq)
        if seq.eviction and num_computed == seq.compacts_at:
            self._compact(seq, seq.eviction)
        if self._changes_at_blocks:
            full = num_computed - num_cached % self.block_size
            next_full = full + self.block_size
            left_at = full + STATE_WINDOW.size  # the block before
            if self.holds_states and num_computed < left_at:
                next_full = left_at
            seq.num_tokens_handled = min(next_full, seq.compacts_at) - 1

    def _compact(self, seq: SequenceBlocks, plan: EvictionPlan) -> None:
        """Go on in the targets, which the step has filled. What they hold is no prefix."""
        for group in self.groups:
            group.compact(seq)
        seq.targets = []
        seq.num_published = 0
        seq.num_evicted = seq.compacts_at - plan.budget
        seq.compacts_at = plan.next_after(seq.compacts_at)
        seq.num_writable = self._num_writable(seq)

    def _slide(self, seq: SequenceBlocks) -> None:
        """Remove the entries between the sinks and what any group still sees from the tables. What
        they hold afterwards is no prefix."""
        first = max(group.num_sink_blocks for group in self.groups)
        num_left = min(seq.num_freed) - first
        if num_left <= 0:
            return
        for group in self.groups:
            group.remove_left(seq, first, num_left)
        seq.num_published = 0
        seq.num_evicted += num_left * self.block_size

    def shrink(self, seq: SequenceBlocks, num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens`, of which no more are computed.

        They are reused first, because their content is useless.
        """
        num_blocks = num_blocks_for(num_tokens - seq.num_evicted, self.block_size)
        for group in self.groups:
            group.shrink(seq, num_blocks)
        seq.num_writable = min(seq.num_writable, num_blocks * self.block_size + seq.num_evicted)

    def release(self, seq: SequenceBlocks) -> None:
        """Free all blocks and host slots. Idempotent."""
        for group in self.groups:
            group.release(seq)
        seq.targets = []
        seq.num_published = seq.num_writable = seq.num_tokens_handled = seq.num_evicted = 0
        seq.num_to_fetch = 0
        seq.compacts_at = seq.eviction.next_after(0) if seq.eviction else NEVER

    def swap_out(self, seq: SequenceBlocks, num_computed: int) -> int:
        """Move the computed blocks to the host; returns the number of computed tokens in them.

        Open blocks are not moved: their tokens are computed again. Returns 0, without effect, if
        the host has no room, or the windows have freed blocks that are needed. Shared blocks are
        also copied; on the device, only this sequence's hold on them ends.
        """
        if self._has_open_blocks:
            num_computed -= num_computed % self.block_size
            num_cached = num_computed - seq.num_evicted
            if not all(group.sees_all_it_needs(seq, num_cached) for group in self.groups):
                return 0
        num_blocks = num_blocks_for(num_computed - seq.num_evicted, self.block_size)
        counts = [group.num_to_swap(seq, num_blocks) for group in self.groups]
        if not any(counts) or any(
            count > group.host.num_free for count, group in zip(counts, self.groups, strict=True)
        ):
            self._note_not_swapped(counts, num_computed)
            return 0
        for group in self.groups:
            group.swap_out(seq, num_blocks)
        seq.targets = []
        seq.num_writable = 0
        return num_computed

    def _note_not_swapped(self, counts: Sequence[int], num_tokens: int) -> None:
        """A sequence with so many blocks per group is not swapped out."""
        missing = [
            (count - group.host.num_free, group.host.ghosts.depth)
            for count, group in zip(counts, self.groups, strict=True)
            if count > group.host.num_free
        ]
        if missing and all(count <= depth for count, depth in missing):
            self.num_lost_host_tokens += num_tokens

    def _swap_in(self, seq: SequenceBlocks) -> None:
        for group in self.groups:
            group.swap_in(seq)
        seq.num_published = 0  # what came back from the host is offered to others again
        self.num_fetched_tokens += seq.num_to_fetch
        seq.num_to_fetch = 0

    def drop_adapter(self, key: AdapterKey) -> int:
        """Drop all cached prefixes of this adapter and of its compositions, on device and host;
        returns their number of blocks."""
        return sum(group.drop_adapter(key) for group in self.groups)

    def erase_on_disk(self, key: AdapterKey) -> None:
        """Drop all prefixes of this adapter and of its compositions on disk, and begin to erase
        them."""
        if self.disk is not None:
            self.disk.erase(key)

    def is_erasing(self, key: AdapterKey) -> bool:
        """Whether its prefixes on disk may still be readable."""
        return self.disk is not None and self.disk.is_erasing(key)

    # --- sizes ------------------------------------------------------------------------------------

    def longest(self, chunk: int) -> int:
        """The maximum number of tokens of a sequence that runs alone, with `chunk` tokens per
        step."""
        return min(group.longest(chunk) for group in self.groups)

    def fits_alone(self, num_tokens: int, chunk: int, eviction: EvictionPlan | None = None) -> bool:
        """Whether a sequence that runs alone can have `num_tokens`, with `chunk` tokens per
        step."""
        if eviction:
            num_blocks = eviction.num_blocks(0, 0, num_tokens)
            return all(num_blocks <= group.num_lasting for group in self.groups)
        return all(group.fits_alone(num_tokens, chunk) for group in self.groups)

    def share(self, seq: SequenceBlocks) -> float:
        """The largest share of a group's blocks that the sequence holds."""
        return max(
            (group.num_held(seq) - len(slots)) / group.pool.num_usable
            for group, slots in zip(self.groups, seq.host_slots, strict=True)
        )

    def target_share(self, seq: SequenceBlocks) -> float:
        """The share of the blocks that the sequence takes, beside those that it holds, when its
        cache is compacted next."""
        if seq.eviction is None or seq.compacts_at == NEVER:
            return 0.0
        smallest = min(group.pool.num_usable for group in self.groups)
        return seq.eviction.num_target_blocks / smallest

    @property
    def has_host_slots(self) -> bool:
        """Whether anything can be swapped or cached on the host."""
        return any(group.host.num_slots for group in self.groups)

    @property
    def host_counts(self) -> tuple[int, ...]:
        """The cached blocks on the host, per group."""
        return tuple(len(group.host.prefixes) for group in self.groups)

    def num_free(self, group: int) -> int:
        return self.groups[group].pool.num_free

    def num_usable(self, group: int) -> int:
        return self.groups[group].pool.num_usable

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Assert that every block and slot is free or held by exactly these sequences."""
        sequences = list(live)
        for group in self.groups:
            group.check_integrity(sequences)
        if self.disk is not None:
            self.disk.check_integrity()
