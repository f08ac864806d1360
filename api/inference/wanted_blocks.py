"""The adapters that the engine wants, brought to this machine's disk."""

from __future__ import annotations

import asyncio

from ...adapters.errors import ObjectNotFound
from ...adapters.fetcher import BlockSource, FetchedBlock
from ...adapters.identity import AdapterKey
from ...engine.messages import BlockFound
from ...platform.adapters import repository
from ...platform.adapters.models import AdapterVersion
from ...platform.adapters.registry import AdapterRef
from ...platform.errors import DatabaseUnavailable
from ..control_plane.control_plane import ControlPlane
from .seen_adapters import SeenAdapters


class WantedBlocks:
    """Looks up where a content is stored and has it fetched; one for the server."""

    def __init__(
        self, control_plane: ControlPlane, fetcher: BlockSource, seen_adapters: SeenAdapters
    ) -> None:
        self._control_plane = control_plane
        self._fetcher = fetcher
        self._seen_adapters = seen_adapters

    async def fetch(self, key: AdapterKey) -> FetchedBlock:
        """The verified block. Raises an AdapterError or PlatformError."""
        found = await self.locate(key)
        return await asyncio.wrap_future(
            self._fetcher.fetch(key, sha256=found.sha256, size_bytes=found.size_bytes)
        )

    async def locate(self, key: AdapterKey) -> BlockFound:
        """What the block in the store must be. Raises an AdapterError or PlatformError."""
        content = await self._find(key)
        if content is None:
            raise ObjectNotFound("no version has this content any more")
        return BlockFound(key, content.object_sha256, content.size_bytes)

    async def _find(self, key: AdapterKey) -> AdapterVersion | AdapterRef | None:
        """A version with this content; while the database is away, the one seen last."""
        try:
            return await self._control_plane.read(
                key.tenant_id, lambda session: repository.find_content(session, key.digest)
            )
        except DatabaseUnavailable:
            return self._seen_adapters.recall_content(key)
