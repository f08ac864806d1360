"""The KV caches of all ranks, each with its own heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kv.block_memory import BlockMemory
from ..kv.cache import KvCache, KvFormat
from ..kv.groups import LayerKvShape
from ..kv.layout import KvGroup, KvOperation
from ..kv.sequence_blocks import BlockTable
from .commands import ClearKv, MoveKv, kv_command, pack_tables
from .followers import Followers


class LeaderKvCache(KvCache):
    """Rank 0's cache. Every follower's cache has the same blocks. Each method raises RankLost."""

    def __init__(
        self,
        followers: Followers,
        groups: Sequence[KvGroup],
        shapes: Sequence[LayerKvShape],
        *,
        block_size: int,
        kv_format: KvFormat,
        device: torch.device,
        num_swap_slots: Sequence[int],
        has_stages: bool,
        block_memory: BlockMemory | None,
        has_spare_blocks: bool,
        num_open_slots: int | None,
    ) -> None:
        """See `KvCache`. `has_stages`: steps before an operation may not have run here yet, so the
        operations wait for their step."""
        super().__init__(
            groups,
            shapes,
            block_size=block_size,
            kv_format=kv_format,
            device=device,
            num_swap_slots=num_swap_slots,
            block_memory=block_memory,
            has_spare_blocks=has_spare_blocks,
            num_open_slots=num_open_slots,
        )
        self._followers = followers
        self._waiting: list[KvOperation] | None = [] if has_stages else None

    def execute(self, operations: Sequence[KvOperation]) -> None:
        for operation in operations:
            self._followers.tell(kv_command(operation))
        if self._waiting is None:
            super().execute(operations)
        else:
            self._waiting += operations

    def execute_at_rest(self, operations: Sequence[KvOperation]) -> None:
        self.execute(operations)
        if self._waiting:
            super().execute(self.take_operations())

    def take_operations(self) -> list[KvOperation]:
        """Those that wait for the step that begins now."""
        operations, self._waiting = self._waiting or [], []
        return operations

    def execute_here(self, operations: Sequence[KvOperation]) -> None:
        """Execute operations that have waited."""
        super().execute(operations)

    def move(
        self, tables: Sequence[BlockTable], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        packed = pack_tables(tables)
        self._followers.tell(MoveKv(packed, tuple(sources), tuple(targets)))
        super().move(tables, sources, targets)

    def clear(self, tables: Sequence[BlockTable], start: int, end: int) -> None:
        self._followers.tell(ClearKv(pack_tables(tables), start, end))
        super().clear(tables, start, end)
