"""Fetches the blocks that the engine asks for to the local disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from ...adapters.errors import AdapterError, AdapterUnavailable
from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ..messages import AdapterFetched, AdapterFetchFailed, ErrorInfo, ToEngine

_log = logging.getLogger(__name__)


class FetchedBlock(Protocol):
    """An adapter's verified block on the local disk."""

    @property
    def path(self) -> Path: ...

    @property
    def tier(self) -> Tier: ...


class AdapterFetches:
    """The concurrent fetches for one engine process."""

    def __init__(
        self,
        fetch: Callable[[AdapterKey], Awaitable[FetchedBlock]],
        send: Callable[[ToEngine], None],
    ) -> None:
        self._fetch_block = fetch
        self._send = send
        self._fetches: set[asyncio.Task[None]] = set()

    def start(self, key: AdapterKey) -> None:
        """Fetch the blocks of the adapter's parts and send the engine the result."""
        fetch = asyncio.create_task(self._fetch(key))
        self._fetches.add(fetch)
        fetch.add_done_callback(self._fetches.discard)

    def cancel(self) -> None:
        """Cancel all fetches."""
        for fetch in self._fetches:
            fetch.cancel()

    async def _fetch(self, key: AdapterKey) -> None:
        try:
            blocks = await asyncio.gather(*map(self._fetch_block, key.parts))
        except AdapterError as exc:
            self._send(_failed(key, exc))
        except Exception:  # every fetch is answered, or its requests would wait for ever
            _log.exception("adapter_fetch_failed", extra={"adapter_digest": key.digest})
            self._send(_failed(key, AdapterUnavailable()))
        else:
            paths = tuple(str(block.path) for block in blocks)
            are_here = all(block.tier is Tier.DISK for block in blocks)
            self._send(AdapterFetched(key, paths, Tier.DISK if are_here else Tier.STORE))


def _failed(key: AdapterKey, error: AdapterError) -> AdapterFetchFailed:
    return AdapterFetchFailed(key, ErrorInfo(error.code, str(error)))
