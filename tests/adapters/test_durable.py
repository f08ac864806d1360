"""Names and contents that are on the disk when a function returns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.adapters.durable import make_directories, sync_tree, write_whole
from support.synced import record_synced


def test_a_whole_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = record_synced(monkeypatch)
    path = tmp_path / "file"
    write_whole(path, b"former")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert synced == [tmp_path / "file.new", tmp_path] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"former")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"former"


def test_a_tree_is_synced_without_what_its_links_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").touch()
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below" / "file").touch()
    (tree / "link").symlink_to(tmp_path / "elsewhere")
    synced = record_synced(monkeypatch)
    sync_tree(tree)
    assert set(synced) == {tree, tree / "below", tree / "below" / "file"}
    assert synced[-1] == tree


def test_a_directory_of_another_process_has_its_name_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "others").mkdir()
    synced = record_synced(monkeypatch)
    make_directories(tmp_path / "others" / "own" / "leaf", mode=0o700)
    assert synced == [tmp_path, tmp_path / "others", tmp_path / "others" / "own"]
    del synced[:]
    make_directories(tmp_path / "others" / "own", mode=0o700)
    assert synced == [tmp_path / "others"]


def test_a_directory_below_one_that_only_others_write_to_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = record_synced(monkeypatch)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path.parent)
    make_directories(tmp_path / "own", mode=0o700)
    assert synced == [tmp_path]
