"""What a server erases of its prefixes on disk when it starts, and the key that it gives them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import SecretStr

from loraplex.adapters.identity import AdapterKey
from loraplex.api.server.planes import open_control_plane
from loraplex.api.server.prefix_disk import open_prefix_disk
from loraplex.api.settings import Settings
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.key_files import FOLDER, key_name, open_folder
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.prefix_keys import PrefixKeys
from loraplex.platform.base import utc_now
from loraplex.platform.tenants.models import Tenant
from support.catalog import make_tenant
from support.databases import copy_of_migrated_sqlite

CONFIG = EngineConfig("base", swap_bytes=1 << 20, prefix_disk_bytes=1 << 20)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        data_dir=tmp_path,
        database=copy_of_migrated_sqlite(tmp_path),
        secret=SecretStr("ab" * 32),
    )


def test_prefixes_of_deleted_tenants_and_adapters_are_unreadable_after_a_start(
    settings: Settings, tmp_path: Path
) -> None:
    control_plane = open_control_plane(settings)
    kept, gone = (make_tenant(control_plane._database, slug).id for slug in ("acme", "gone"))
    with control_plane._database.platform_transaction() as session:
        tenant = session.get(Tenant, gone)
        assert tenant is not None
        tenant.deleting_at = utc_now()
    keys = PrefixKeys(open_folder(tmp_path / "prefixes", "one") / FOLDER, bytes(32))
    deleted = AdapterKey(kept, "sha256:" + "0" * 64)
    names = [
        key_name(CacheNamespace(tenant_id, "runtime", adapter))
        for tenant_id, adapter in ((kept, None), (kept, deleted), (gone, None))
    ]
    for name in names:
        keys.load_or_create(name)
    disk = asyncio.run(open_prefix_disk(settings, CONFIG, control_plane))
    assert disk.config.prefix_disk_dir == str(tmp_path / "prefixes")
    assert list(keys.names()) == names[:1]
    control_plane.close()


def test_the_key_is_of_the_servers_secret(settings: Settings) -> None:
    control_plane = open_control_plane(settings)
    other = settings.model_copy(update={"secret": SecretStr("cd" * 32)})
    first, again, foreign = (
        asyncio.run(open_prefix_disk(each, CONFIG, control_plane)).key
        for each in (settings, settings, other)
    )
    assert first == again != foreign
    assert len(first) == 32
    control_plane.close()


def test_a_folder_of_the_operators_is_used(settings: Settings, tmp_path: Path) -> None:
    control_plane = open_control_plane(settings)
    config = EngineConfig(
        "base", swap_bytes=1, prefix_disk_bytes=1, prefix_disk_dir=str(tmp_path / "fast")
    )
    assert asyncio.run(open_prefix_disk(settings, config, control_plane)).config == config
    control_plane.close()


def test_nothing_is_read_without_the_tier(settings: Settings) -> None:
    control_plane = open_control_plane(settings)
    disk = asyncio.run(open_prefix_disk(settings, EngineConfig("base"), control_plane))
    assert disk.config == EngineConfig("base")
    control_plane.close()
