"""Prefixes that one engine computes and another decodes from (Splitwise, Patel et al. 2024;
DistServe, Zhong et al. 2024).

What is handed over becomes a cached prefix on the receiver's host, under the namespace of the
request that waits for it. So the request is admitted, or computes what is missing, as after any
other hit, and nothing that must be the same in both engines travels beside the pages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...adapters.identity import AdapterKey
from ..kv.blocks import KvBlocks
from ..messages import GroupPages, PrefixPiece, PrefixTransport
from ..request import Request
from .page_transport import PagesInFrames, PageTransport
from .shared_pages import SharedPages

if TYPE_CHECKING:
    from ..execution.runner import ModelRunner  # which needs torch

PIECE_BYTES = 4 << 20
"""A step sends one piece, so that the events of other requests do not wait for long."""
MAX_BLOCK_BYTES = 32 << 20
"""Of a block of every group, which are in one message. Larger states are computed again."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A piece that waits to be sent."""

    adapter: AdapterKey | None
    """By which it was computed."""
    transport: PrefixTransport
    piece: PrefixPiece


_log = logging.getLogger(__name__)


class PrefixHandover:
    """Reads the prefixes that requests export, and stores those that requests await."""

    def __init__(
        self,
        kv: KvBlocks,
        runner: ModelRunner,
        block_bytes: Sequence[int],
        clock: Callable[[], float],
        *,
        is_divided: bool,
    ) -> None:
        """`block_bytes`: of a block of each group. `is_divided`: other ranks hold parts of the
        blocks, so nothing is sent or kept."""
        self._transports: Mapping[PrefixTransport, PageTransport] = {
            PrefixTransport.FRAMES: PagesInFrames(),
            PrefixTransport.MEMORY: SharedPages(clock),
        }
        self._is_served = not is_divided and sum(block_bytes) <= MAX_BLOCK_BYTES
        self._kv = kv
        self._runner = runner
        self._blocks_per_piece = max(PIECE_BYTES // sum(block_bytes), 1)
        self.pieces: deque[_Waiting] = deque()
        """What waits to be sent, in this order."""
        self.has_unread = False
        """Whether transports hold pages that were sent."""

    def forget(self, key: AdapterKey) -> None:
        """Send nothing more that was computed with this adapter."""
        kept = [
            each if each.adapter is None or not each.adapter.has_part(key) else _nothing(each)
            for each in self.pieces
        ]
        self.pieces = deque(kept)
        for transport in self._transports.values():
            transport.forget(key)

    def take_piece(self) -> PrefixPiece:
        """The next one to be sent."""
        waiting = self.pieces.popleft()
        self.has_unread = True
        return self._transports[waiting.transport].send(waiting.piece, waiting.adapter)

    def poll(self) -> None:
        """Free what transports hold and nobody needs."""
        held = [transport.poll() for transport in self._transports.values()]
        self.has_unread = any(held)

    def close(self) -> None:
        """Free what is on its way."""
        for transport in self._transports.values():
            transport.close()

    def export(self, request: Request, *, is_deleted: bool) -> None:
        """Read what is cached of a prompt that has been computed, to be sent in pieces: nothing if
        its adapter `is_deleted`, though the request was still allowed to end."""
        blocks: Sequence[dict[int, int]] = ()
        if self._is_served and not is_deleted:
            blocks = self._kv.cached_blocks(request.kv, request.namespace, request.token_ids)
        num_blocks = max((max(found, default=-1) for found in blocks), default=-1) + 1
        starts = range(0, num_blocks, self._blocks_per_piece)
        for start in starts:
            groups = [self._read(group, found, start) for group, found in enumerate(blocks)]
            self._queue(request, PrefixPiece(request.request_id, groups, start == starts[-1]))
        if not num_blocks:
            self._queue(request, PrefixPiece(request.request_id, [], is_last=True))

    def store(self, request: Request, piece: PrefixPiece) -> None:
        """Keep a piece on the host, as far as there is room."""
        if not self._is_served or not self._kv.has_host_slots:
            return
        piece = self._transports[piece.transport].receive(piece)
        # What an evicted prefix left to be copied must not be copied over it.
        self._runner.execute_at_rest(self._kv.operations.take())
        for group, held in enumerate(piece.groups):
            if not self._fits(request, group, held):
                _log.error("prefix_not_taken", extra={"request_id": request.request_id})
                return
            slots = self._kv.store_on_host(
                request.kv, request.namespace, request.token_ids, group, held.indices
            )
            self._runner.write_host(group, slots, held.pages)

    def _queue(self, request: Request, piece: PrefixPiece) -> None:
        transport = request.submitted.prefix_transport
        self.pieces.append(_Waiting(request.adapter, transport, piece))

    def _fits(self, request: Request, group: int, held: GroupPages) -> bool:
        """Whether these may be pages of the request's prompt."""
        if group >= len(self._kv.groups):
            return False
        num_full = (request.num_prompt_tokens - 1) // self._kv.block_size
        return all(0 <= index < num_full for index in held.indices) and self._runner.are_pages(
            group, len(held.indices), held.pages
        )

    def _read(self, group: int, found: dict[int, int], start: int) -> GroupPages:
        end = start + self._blocks_per_piece
        indices = [index for index in found if start <= index < end]
        pages = self._runner.read_blocks(group, [found[index] for index in indices])
        return GroupPages(indices, pages)


def _nothing(waiting: _Waiting) -> _Waiting:
    """The same piece without pages."""
    return replace(waiting, piece=replace(waiting.piece, groups=[]))
