"""The prefix cache over all KV groups. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .group_blocks import GroupBlocks
from .prefix_cache import CacheNamespace, Prefix, PrefixHasher
from .sequence_blocks import SequenceBlocks


class LostBlocks(NamedTuple):
    """Blocks that are computed again."""

    num_on_device: int
    num_on_host: int


class SharedPrefixes:
    """The prefixes that sequences share. A hit needs the blocks that the next query sees, in every
    group."""

    def __init__(self, groups: Sequence[GroupBlocks], block_size: int, *, secret: bytes) -> None:
        self._groups = groups
        self._block_size = block_size
        self._hasher = PrefixHasher(block_size, secret=secret)

    def longest_hit(
        self,
        chain: list[Prefix],
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        *,
        on_host: bool = False,
        on_disk: bool = False,
    ) -> int:
        """The number of blocks of the longest cached prefix, at most all tokens but one.

        `on_host`, `on_disk`: blocks on the host, and on the disk, count too.
        `chain` stores the keys of the prefixes that were looked up.
        """
        longest = 0
        runs = [0] * len(self._groups)  # cached blocks in a row, up to the current one
        for index in range((len(token_ids) - 1) // self._block_size):
            prefix = self._hasher.prefix(chain, index, namespace, token_ids)
            for group in self._groups:
                if group.has(prefix, on_host=on_host, on_disk=on_disk):
                    runs[group.index] += 1
                elif group.layout.window is None or index < group.num_sink_blocks:
                    return longest
                else:
                    runs[group.index] = 0
            end = index + 1
            if all(runs[group.index] >= group.num_seen(end) for group in self._groups):
                longest = end
        return longest

    def key_of(
        self,
        chain: list[Prefix],
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        index: int,
    ) -> Prefix:
        """The key of the prefix that ends with block `index`, which these tokens fill; `chain` as
        of `longest_hit`."""
        for each in range(min(len(chain), index), index + 1):
            prefix = self._hasher.prefix(chain, each, namespace, token_ids)
        return prefix

    def take_ghosts(
        self,
        chain: list[Prefix],
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        num_cached: int,
    ) -> LostBlocks:
        """The number of blocks of these tokens after the first `num_cached` that were evicted a
        short while ago. Each eviction is counted once."""
        num_on_device = num_on_host = 0
        for index in range(num_cached, (len(token_ids) - 1) // self._block_size):
            prefix = self._hasher.prefix(chain, index, namespace, token_ids)
            # Every group's are taken.
            was_on_device = sum(group.ghosts.take(prefix.key) for group in self._groups) > 0
            was_on_host = sum(group.host.ghosts.take(prefix.key) for group in self._groups) > 0
            if not (was_on_device or was_on_host):
                break
            num_on_device += was_on_device
            num_on_host += was_on_host
        return LostBlocks(num_on_device, num_on_host)

    def publish(
        self,
        seq: SequenceBlocks,
        namespace: CacheNamespace,
        token_ids: Sequence[int],
        num_blocks: int,
    ) -> None:
        """Publish the sequence's first `num_blocks`, which are computed."""
        for index in range(seq.num_published, num_blocks):
            prefix = self._hasher.prefix(seq.chain, index, namespace, token_ids)
            for group in self._groups:
                group.publish(seq, index, prefix)
            seq.num_published = index + 1
