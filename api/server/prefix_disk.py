"""The key and the folder of a server's cached prefixes on disk."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select

from ...adapters.identity import AdapterKey
from ...engine.config import EngineConfig
from ...engine.kv.key_files import keep_keys_of
from ...platform.adapters.repository import list_stored_contents_of_all_tenants
from ...platform.errors import InvalidValue
from ...platform.secrets import PREFIX_DISK_KEY, derive_key
from ...platform.sessions import PlatformSession
from ...platform.tenants.models import Tenant
from ...platform.version import __version__
from ..control_plane.control_plane import ControlPlane
from ..settings import Settings

FOLDER = "prefixes"
"""In the data folder."""


class PrefixDisk(NamedTuple):
    config: EngineConfig
    """With the folder, if there is this tier."""
    key: bytes
    """Of this server's secret and version: after an upgrade nothing is found."""


async def open_prefix_disk(
    settings: Settings, config: EngineConfig, control_plane: ControlPlane
) -> PrefixDisk:
    """Erase what was computed with adapters, or for tenants, that were deleted while this server
    did not run. Raises InvalidValue if the disk fails, or a PlatformError."""
    secret = settings.load_secrets()[0]
    key = derive_key(secret, f"{PREFIX_DISK_KEY} {__version__}")
    if not config.prefix_disk_bytes:
        return PrefixDisk(config, key)
    folder = Path(config.prefix_disk_dir or settings.data_dir / FOLDER)
    tenant_ids, adapters = await control_plane.read_all_tenants(_list_kept)
    try:
        await asyncio.to_thread(keep_keys_of, folder, tenant_ids, adapters)
    except OSError as exc:
        raise InvalidValue(f"--prefix-disk-dir: {exc}", param="prefix_disk_dir") from exc
    return PrefixDisk(replace(config, prefix_disk_dir=str(folder)), key)


def _list_kept(session: PlatformSession) -> tuple[list[str], set[AdapterKey]]:
    tenant_ids = session.scalars(select(Tenant.id).where(Tenant.deleting_at.is_(None))).all()
    return list(tenant_ids), list_stored_contents_of_all_tenants(session)
