"""Erases adapters' prefixes on disk while no engine process does."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ...adapters.identity import AdapterKey
from ..config import EngineConfig
from ..errors import EngineUnavailable
from ..kv.key_files import erase_keys_of

_log = logging.getLogger(__name__)


class PrefixErasures:
    def __init__(self, config: EngineConfig) -> None:
        self._tier = None if config.prefix_disk_dir is None else Path(config.prefix_disk_dir)

    async def erase(self, key: AdapterKey) -> None:
        """Make the adapter's prefixes unreadable. Raises EngineUnavailable if the disk fails."""
        if self._tier is None:
            return
        try:
            await asyncio.to_thread(erase_keys_of, self._tier, key)
        except OSError as exc:
            _log.error("prefixes_not_erased_on_disk", extra={"error": str(exc)})
            raise EngineUnavailable from exc
