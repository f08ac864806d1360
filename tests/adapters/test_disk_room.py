"""The writable space of a disk, and the reserve for the database."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.disk_room import (
    MAX_RESERVE_BYTES,
    MIN_RESERVE_BYTES,
    DiskRoom,
    DiskSize,
    default_reserve_bytes,
    full_disk_told,
)
from loraplex.adapters.errors import StorageFull
from loraplex.adapters.store.local import LocalStore

GIB = 1 << 30


def disk(total: int, free: int) -> Callable[[Path], DiskSize]:
    return lambda directory: DiskSize(total, free)


@pytest.mark.parametrize(
    ("total", "reserve"),
    [(60_000_000, MIN_RESERVE_BYTES), (10 * GIB, 10 * GIB // 20), (1000 * GIB, MAX_RESERVE_BYTES)],
)
def test_the_reserve_follows_the_disk_within_bounds(total: int, reserve: int) -> None:
    assert default_reserve_bytes(total) == reserve


def test_what_is_free_beside_the_reserve_may_be_written(tmp_path: Path) -> None:
    room = DiskRoom(tmp_path, 100, measure=disk(1000, 150))
    assert room.free_bytes == 50
    room.check(50)
    with pytest.raises(StorageFull):
        room.check(51)


def test_a_part_of_the_reserve_may_lie_in_a_file(tmp_path: Path) -> None:
    reserve_file = tmp_path / "reserve"
    room = DiskRoom(tmp_path, 100, reserve_file=reserve_file, measure=disk(1000, 150))
    assert room.free_bytes == 50, "the file is not there"
    reserve_file.write_bytes(bytes(40))
    assert room.free_bytes == 90
    reserve_file.write_bytes(bytes(400))
    assert room.free_bytes == 150


def test_a_reserve_file_on_another_disk_keeps_nothing_here(tmp_path: Path) -> None:
    room = DiskRoom(tmp_path, 100, reserve_file=Path("/proc/version"), measure=disk(1000, 150))
    assert room.free_bytes == 50


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_by_its_code(reason: int) -> None:
    with pytest.raises(StorageFull), full_disk_told():
        raise OSError(reason, "full")
    with pytest.raises(PermissionError), full_disk_told():
        raise PermissionError(errno.EACCES, "no")


def test_a_store_on_this_machine_leaves_the_reserve_alone(tmp_path: Path) -> None:
    block = tmp_path / "block"
    block.write_bytes(b"x")
    store = LocalStore(tmp_path / "store", reserve_bytes=1 << 60)
    with pytest.raises(StorageFull):
        store.put_file("t/one/a/x.block", block, sha256="ab" * 32)
    assert not store.exists("t/one/a/x.block")
    assert list((tmp_path / "store" / ".incoming").iterdir()) == []
