"""What a server erases of its prefixes on disk when it starts, and the key that it gives them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
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
from loraplex.platform.errors import InvalidValue
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


def leave_prefixes(settings: Settings, config: EngineConfig) -> Path:
    """Start a server, let an engine write a key, and return its folder."""
    control_plane = open_control_plane(settings)
    tenant_id = make_tenant(control_plane._database, "acme").id
    disk = asyncio.run(open_prefix_disk(settings, config, control_plane))
    control_plane.close()
    folder = open_folder(Path(disk.config.prefix_disk_dir or ""), "one")
    name = key_name(CacheNamespace(tenant_id, "runtime", None))
    PrefixKeys(folder / FOLDER, disk.key).load_or_create(name)
    return folder


@pytest.mark.parametrize("is_in_fleet", [False, True])
@pytest.mark.parametrize("folder", [None, "fast"])
def test_a_start_without_the_tier_removes_the_prefixes_of_the_one_before(
    folder: str | None, is_in_fleet: bool, settings: Settings, tmp_path: Path
) -> None:
    given = folder and str(tmp_path / folder)
    left = leave_prefixes(settings, replace(CONFIG, prefix_disk_dir=given))
    config = CONFIG if is_in_fleet else EngineConfig("base")
    if is_in_fleet:
        settings = settings.model_copy(update={"fleet_certificates": tmp_path})
    control_plane = open_control_plane(settings)
    assert asyncio.run(open_prefix_disk(settings, config, control_plane)).config == config
    assert not left.exists()
    control_plane.close()


@pytest.mark.parametrize("folders", [("fast", None), (None, "fast"), ("fast", "faster")])
def test_a_start_with_another_folder_removes_the_prefixes_in_the_one_before(
    folders: tuple[str | None, str | None], settings: Settings, tmp_path: Path
) -> None:
    before, after = (
        replace(CONFIG, prefix_disk_dir=folder and str(tmp_path / folder)) for folder in folders
    )
    left = leave_prefixes(settings, before)
    control_plane = open_control_plane(settings)
    asyncio.run(open_prefix_disk(settings, after, control_plane))
    assert not left.exists()
    control_plane.close()


def test_a_start_with_the_same_folder_keeps_the_prefixes(
    settings: Settings, tmp_path: Path
) -> None:
    config = replace(CONFIG, prefix_disk_dir=str(tmp_path / "fast"))
    left = leave_prefixes(settings, config)
    control_plane = open_control_plane(settings)
    asyncio.run(open_prefix_disk(settings, config, control_plane))
    assert list((left / FOLDER).iterdir())
    control_plane.close()


def test_prefixes_that_cannot_be_removed_are_removed_by_a_later_start(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    left = leave_prefixes(settings, replace(CONFIG, prefix_disk_dir=str(tmp_path / "fast")))
    control_plane = open_control_plane(settings)
    with monkeypatch.context() as patched:
        patched.setattr("loraplex.api.server.prefix_disk.remove_folders", fail)
        with pytest.raises(InvalidValue):
            asyncio.run(open_prefix_disk(settings, CONFIG, control_plane))
    asyncio.run(open_prefix_disk(settings, CONFIG, control_plane))
    assert not left.exists()
    control_plane.close()


def test_nothing_is_read_without_the_tier(settings: Settings) -> None:
    control_plane = open_control_plane(settings)
    disk = asyncio.run(open_prefix_disk(settings, EngineConfig("base"), control_plane))
    assert disk.config == EngineConfig("base")
    control_plane.close()
