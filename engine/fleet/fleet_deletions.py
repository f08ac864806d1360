"""Removes an adapter from every replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...adapters.identity import AdapterKey
from ..errors import EngineUnavailable
from ..messages import EvictionReceipt, ReplicaState
from .replica_link import ReplicaLink


async def evict_everywhere(
    list_links: Callable[[], Sequence[ReplicaLink]], key: AdapterKey, *, drain_seconds: float
) -> EvictionReceipt:
    """Return once no replica holds the adapter; also those that join meanwhile are asked.

    A replica that cannot be reached holds the answer up until it can be, is removed, or holds
    nothing because its lease has ended.
    """
    ends_at = time.monotonic() + drain_seconds
    receipts: dict[ReplicaLink, EvictionReceipt] = {}
    while missing := [link for link in list_links() if link not in receipts]:
        answers = await asyncio.gather(*(_evict(link, key, ends_at) for link in missing))
        receipts.update(zip(missing, answers, strict=True))
    return _sum(list(receipts.values()))


async def _evict(link: ReplicaLink, key: AdapterKey, ends_at: float) -> EvictionReceipt:
    while not (link.state is ReplicaState.GONE or link.member.has_expired):
        if link.is_linked:
            with suppress(EngineUnavailable):
                return await link.evict(key, max(0.0, ends_at - time.monotonic()))
        else:
            await link.wait_for_change()
    return EvictionReceipt()


def _sum(receipts: Sequence[EvictionReceipt]) -> EvictionReceipt:
    return EvictionReceipt(
        device_bytes=sum(each.device_bytes for each in receipts),
        host_bytes=sum(each.host_bytes for each in receipts),
        num_drained=sum(each.num_drained for each in receipts),
        num_aborted=sum(each.num_aborted for each in receipts),
        seconds=max((each.seconds for each in receipts), default=0.0),
    )
