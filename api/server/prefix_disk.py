"""The key and the folder of a server's cached prefixes on disk."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select

from ...adapters.durable import write_whole
from ...adapters.identity import AdapterKey
from ...engine.config import EngineConfig
from ...engine.kv.key_files import keep_keys_of, remove_folders
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
NOTE = "prefix_disk_dir"
"""A file in the data folder: the folder that was used last, if it is another one."""


class PrefixDisk(NamedTuple):
    config: EngineConfig
    """With the folder, if there is this tier."""
    key: bytes
    """Of this server's secret and version: after an upgrade nothing is found."""


async def open_prefix_disk(
    settings: Settings, config: EngineConfig, control_plane: ControlPlane
) -> PrefixDisk:
    """Erase what was computed with adapters, or for tenants, that were deleted while this server
    did not run, and all that it has left in a folder that it uses no more.

    Without the option, or in a fleet, there is no tier. Raises InvalidValue if a disk fails, or a
    PlatformError.
    """
    secret = settings.load_secrets()[0]
    key = derive_key(secret, f"{PREFIX_DISK_KEY} {__version__}")
    folder = _folder(settings, config)
    await asyncio.to_thread(_remove_earlier, settings.data_dir, folder)
    if folder is None:
        return PrefixDisk(config, key)
    tenant_ids, adapters = await control_plane.read_all_tenants(_list_kept)
    try:
        await asyncio.to_thread(keep_keys_of, folder, tenant_ids, adapters)
    except OSError as exc:
        raise InvalidValue(f"--prefix-disk-dir: {exc}", param="prefix_disk_dir") from exc
    return PrefixDisk(replace(config, prefix_disk_dir=str(folder)), key)


def _folder(settings: Settings, config: EngineConfig) -> Path | None:
    """None: there is no tier. The replicas of a fleet have tiers of their own."""
    if settings.fleet_certificates is not None or not config.prefix_disk_bytes:
        return None
    return Path(config.prefix_disk_dir or settings.data_dir / FOLDER).resolve()


def _remove_earlier(data_dir: Path, used: Path | None) -> None:
    """Remove what earlier starts have written to other folders, where no deletion would erase it,
    and note the folder of this one. Raises InvalidValue."""
    own, note = (data_dir / FOLDER).resolve(), data_dir / NOTE
    try:
        noted = Path(os.fsdecode(note.read_bytes())) if note.exists() else own
        for folder in {own, noted} - {used}:
            remove_folders(folder)
        if used in (None, own):
            note.unlink(missing_ok=True)
        else:
            write_whole(note, os.fsencode(used))
    except OSError as exc:
        raise InvalidValue(
            f"The prefixes on disk of an earlier start cannot be removed: {exc}",
            param="prefix_disk_dir",
        ) from exc


def _list_kept(session: PlatformSession) -> tuple[list[str], set[AdapterKey]]:
    tenant_ids = session.scalars(select(Tenant.id).where(Tenant.deleting_at.is_(None))).all()
    return list(tenant_ids), list_stored_contents_of_all_tenants(session)
