"""Names and contents that are on the disk when a function returns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.adapters.durable import write_whole
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
