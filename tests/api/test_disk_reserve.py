"""The file that gives its bytes to the database when the disk is full."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.disk_room import DiskSize
from loraplex.api.upkeep.disk_reserve import MAX_FILE_BYTES, DiskReserve, open_reserve

MIB = 1 << 20
RESERVE = 8 * MIB


@dataclass
class Disk:
    """Of which the test says how much is free beside the file."""

    path: Path
    others_leave: int

    def measure(self, _directory: Path) -> DiskSize:
        return DiskSize(100 * MIB, max(0, self.others_leave - self.held()))

    def held(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def reserve(self) -> DiskReserve:
        return DiskReserve(self.path, RESERVE, measure=self.measure)


def test_the_file_is_a_quarter_of_the_reserve_and_takes_its_room(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "reserve", 50 * MIB)
    disk.reserve().keep()
    assert disk.held() == RESERVE // 4
    assert disk.path.stat().st_blocks * 512 >= RESERVE // 4
    assert disk.path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_gets_what_it_lacks_and_no_more(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "reserve", 50 * MIB)
    reserve = disk.reserve()
    reserve.keep()
    disk.others_leave = 2 * MIB  # all of it is the file's
    reserve.keep()
    assert disk.held() == 2 * MIB - MIB // 2
    reserve.keep()
    assert disk.held() == 2 * MIB - MIB // 2
    disk.others_leave = 0
    for _ in range(5):
        reserve.keep()
    assert disk.held() == 0


def test_the_file_grows_again_once_there_is_room(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "reserve", MIB)
    reserve = disk.reserve()
    reserve.keep()
    assert disk.held() == 0, "there is none to take"
    disk.others_leave = 50 * MIB
    reserve.keep()
    assert disk.held() == RESERVE // 4


def test_on_a_large_disk_the_file_stays_small(tmp_path: Path) -> None:
    _, room = open_reserve(tmp_path, 1 << 30)
    assert (tmp_path / "reserve").stat().st_size == MAX_FILE_BYTES
    assert room.reserve_bytes == 1 << 30
