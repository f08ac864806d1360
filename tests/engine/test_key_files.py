from __future__ import annotations

from pathlib import Path

from loraplex.adapters.identity import AdapterKey, composed_key
from loraplex.engine.kv.key_files import (
    FOLDER,
    erase_keys_of,
    keep_keys_of,
    key_name,
    open_folder,
    remove_folders,
)
from loraplex.engine.kv.prefix_cache import CacheNamespace
from loraplex.engine.kv.prefix_keys import PrefixKeys

TIER_KEY = bytes(range(32))
A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def name_of(adapter: AdapterKey | None, tenant_id: str = "acme") -> str:
    return key_name(CacheNamespace(tenant_id, "runtime", adapter))


def keys_in(tier: Path) -> PrefixKeys:
    return PrefixKeys(open_folder(tier, "one") / FOLDER, TIER_KEY)


def test_a_key_stays_until_it_is_erased(tmp_path: Path) -> None:
    keys, name = keys_in(tmp_path), name_of(AdapterKey("acme", A))
    key = keys.load_or_create(name)
    assert keys.load_or_create(name) == keys_in(tmp_path).load(name) == key
    keys.remove([name])
    assert keys.load(name) is None
    assert keys.load_or_create(name) != key


def test_another_tier_key_opens_none(tmp_path: Path) -> None:
    name = name_of(None)
    keys_in(tmp_path).load_or_create(name)
    assert PrefixKeys(open_folder(tmp_path, "one") / FOLDER, bytes(32)).load(name) is None


def test_a_renamed_key_is_none(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    own, foreign = name_of(None), name_of(None, "globex")
    keys.load_or_create(own)
    folder = tmp_path / "kv-one" / FOLDER
    (folder / f"{own}.key").rename(folder / f"{foreign}.key")
    assert keys.load(foreign) is None


def test_erasing_an_adapter_erases_its_compositions_and_no_others(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    deleted = AdapterKey("acme", A)
    doomed = [name_of(deleted), name_of(composed_key("acme", {A: 1.0, B: 0.5}))]
    kept = [
        name_of(AdapterKey("acme", B)),
        name_of(None),
        name_of(AdapterKey("globex", A), "globex"),
    ]
    for name in (*doomed, *kept):
        keys.load_or_create(name)
    erase_keys_of(tmp_path, deleted)
    assert sorted(keys.names()) == sorted(kept)


def test_a_start_keeps_the_keys_of_known_tenants_and_adapters_alone(tmp_path: Path) -> None:
    keys = keys_in(tmp_path)
    kept = [name_of(None), name_of(AdapterKey("acme", A))]
    doomed = [name_of(AdapterKey("acme", B)), name_of(None, "gone")]
    for name in (*kept, *doomed):
        keys.load_or_create(name)
    keep_keys_of(tmp_path, ["acme"], [AdapterKey("acme", A)])
    assert sorted(keys.names()) == sorted(kept)


def test_names_say_nothing_about_the_tenant(tmp_path: Path) -> None:
    assert "acme" not in name_of(AdapterKey("acme", A))


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    open_folder(tmp_path, "one")
    open_folder(tmp_path, "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv-two", "other"]
    remove_folders(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_key_is_overwritten_before_its_folder_is_removed(tmp_path: Path) -> None:
    keys_in(tmp_path).load_or_create(name_of(None))
    content = tmp_path / "content"
    content.hardlink_to(tmp_path / "kv-one" / FOLDER / f"{name_of(None)}.key")
    open_folder(tmp_path, "two")
    assert content.read_bytes() == bytes(content.stat().st_size)


def test_there_is_nothing_to_erase_without_a_folder(tmp_path: Path) -> None:
    erase_keys_of(tmp_path / "absent", AdapterKey("acme", A))
    keep_keys_of(tmp_path / "absent", [], [])
    remove_folders(tmp_path / "absent")
