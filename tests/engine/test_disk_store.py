"""The store of prefixes on disk by itself, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.engine.kv.disk_store import DiskStore, GroupFile
from loraplex.engine.kv.disk_tier import Written
from loraplex.engine.kv.prefix_cache import CacheNamespace, Prefix
from support.waiting import wait_for

BLOCK_BYTES = 64
PREFIX = Prefix(bytes(32), b"", (1, 2, 3), CacheNamespace("acme", "runtime", None))


def test_a_relative_folder_is_used_after_the_working_directory_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    store = DiskStore(
        Path("prefixes"), [GroupFile(1, BLOCK_BYTES)], tier_key=bytes(32), identity="one"
    )
    monkeypatch.chdir(tmp_path / "other")
    store.write(0, 0, PREFIX, lambda: memoryview(bytes(BLOCK_BYTES)))
    assert wait_for(store.take_done) == [Written(0, 0, True)]
    store.close()
