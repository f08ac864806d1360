from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.disk_cache import (
    CachedFile,
    DiskCache,
    DiskCacheStats,
    list_cached_files,
)
from loraplex.adapters.errors import ObjectNotFound
from loraplex.adapters.identity import AdapterKey

SIZE = 1000


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_cache(tmp_path: Path, clock: Clock) -> Callable[..., DiskCache]:
    """Opens the same directory each time, as a restart does."""

    def make(capacity_bytes: int = 3 * SIZE, free_bytes: int = 1 << 40) -> DiskCache:
        return DiskCache(
            tmp_path / "cache",
            capacity_bytes,
            min_stay_seconds=60.0,
            clock=clock,
            free_bytes=lambda directory: free_bytes - held_bytes(directory),
        )

    return make


def make_key(index: int, tenant: str = "tenant") -> AdapterKey:
    return AdapterKey(tenant, f"sha256:{index:064x}")


def content(index: int) -> bytes:
    return bytes([index]) * SIZE


def held_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def add(cache: DiskCache, index: int, tenant: str = "tenant") -> Path:
    return cache.add(make_key(index, tenant), SIZE, lambda path: write(path, content(index)))


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def get(cache: DiskCache, index: int, tenant: str = "tenant") -> Path | None:
    sha256 = hashlib.sha256(content(index)).hexdigest()
    return cache.get(make_key(index, tenant), sha256=sha256, size_bytes=SIZE)


def present(cache: DiskCache, indices: range, tenant: str = "tenant") -> list[int]:
    return [index for index in indices if get(cache, index, tenant) is not None]


def test_finds_what_was_added(make_cache: Callable[..., DiskCache]) -> None:
    cache = make_cache()
    path = add(cache, 1)
    assert get(cache, 1) == path
    assert path.read_bytes() == content(1)
    assert get(cache, 2) is None
    assert cache.used_bytes == SIZE


def test_evicts_the_least_recently_used(make_cache: Callable[..., DiskCache], clock: Clock) -> None:
    cache = make_cache()
    for index in range(3):
        add(cache, index)
    clock.now = 100.0
    assert get(cache, 0)
    clock.now = 200.0
    add(cache, 3)
    assert present(cache, range(4)) == [0, 2, 3]
    assert cache.used_bytes == 3 * SIZE


def test_what_was_just_handed_out_stays_even_beyond_the_capacity(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache()
    paths = [add(cache, index) for index in range(5)]
    assert all(path.exists() for path in paths)
    clock.now = 61.0
    add(cache, 5)
    assert present(cache, range(6)) == [3, 4, 5]
    assert cache.used_bytes == 3 * SIZE


def test_what_was_read_stays_no_longer_than_there_is_room(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=2 * SIZE)
    for index in range(3):
        add(cache, index)
        cache.note_read(make_key(index))
    assert present(cache, range(3)) == [1, 2]


def test_what_is_handed_out_anew_stays_again(make_cache: Callable[..., DiskCache]) -> None:
    cache = make_cache(capacity_bytes=2 * SIZE)
    add(cache, 0)
    cache.note_read(make_key(0))
    assert get(cache, 0)
    for index in (1, 2):
        add(cache, index)
        cache.note_read(make_key(index))
    assert present(cache, range(3)) == [0, 2]


def test_a_download_longer_than_the_minimum_stay_is_kept(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=SIZE)

    def slow(path: Path) -> None:
        write(path, content(1))
        clock.now = 100.0
        add(cache, 2)

    assert cache.add(make_key(1), SIZE, slow).read_bytes() == content(1)
    clock.now = 200.0
    add(cache, 3)
    assert present(cache, range(4)) == [3]
    assert cache.used_bytes == SIZE


def test_a_late_reader_of_an_earlier_file_does_not_end_a_download(
    make_cache: Callable[..., DiskCache],
) -> None:
    cache = make_cache(capacity_bytes=SIZE)

    def download(path: Path) -> None:
        cache.note_read(make_key(1))
        add(cache, 2)
        write(path, content(1))

    assert cache.add(make_key(1), SIZE, download).read_bytes() == content(1)


def test_entry_removed_while_it_is_downloaded_leaves_nothing(
    make_cache: Callable[..., DiskCache], tmp_path: Path
) -> None:
    cache = make_cache()

    def download(path: Path) -> None:
        cache.remove(make_key(1))
        write(path, content(1))

    with pytest.raises(ObjectNotFound):
        cache.add(make_key(1), SIZE, download)
    assert cache.used_bytes == 0
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tenant_does_not_push_out_what_others_use(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=6 * SIZE)
    for index in range(3):
        add(cache, index, "modest")
    for index in range(20):
        clock.now += 61.0
        present(cache, range(3), "modest")
        add(cache, index, "greedy")
    assert present(cache, range(3), "modest") == [0, 1, 2]
    assert present(cache, range(20), "greedy") == [17, 18, 19]


def test_a_share_that_nobody_used_lately_is_taken(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=6 * SIZE)
    for index in range(3):
        add(cache, index, "gone")
    clock.now = 601.0
    for index in range(6):
        add(cache, index, "busy")
    assert present(cache, range(3), "gone") == []
    assert present(cache, range(6), "busy") == list(range(6))


def test_a_newcomer_gets_its_share_from_those_who_hold_more(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=6 * SIZE)
    add(cache, 0, "modest")
    for index in range(5):
        add(cache, index, "first")
    for index in range(3):
        clock.now += 61.0
        add(cache, index, "second")
    assert present(cache, range(1), "modest") == [0]
    assert present(cache, range(5), "first") == [3, 4]
    assert present(cache, range(3), "second") == [0, 1, 2]


def test_a_newcomer_beyond_its_share_leaves_the_others_theirs(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=6 * SIZE)
    for index in range(3):
        add(cache, index, "first")
        add(cache, index, "second")
    clock.now = 61.0
    cache.add(make_key(9, "third"), 4 * SIZE, lambda path: write(path, bytes(4 * SIZE)))
    assert present(cache, range(3), "first") == [1, 2]
    assert present(cache, range(3), "second") == [1, 2]


def test_shares_are_known_after_a_restart(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    add(make_cache(capacity_bytes=4 * SIZE), 0, "modest")
    greedy = make_cache(capacity_bytes=4 * SIZE)
    for index in range(3):
        add(greedy, index, "greedy")
    restarted = make_cache(capacity_bytes=4 * SIZE)
    for tenant in ("modest", "greedy"):
        present(restarted, range(3), tenant)
    clock.now = 61.0
    add(restarted, 3, "greedy")
    assert present(restarted, range(1), "modest") == [0]


def test_on_a_full_disk_old_blocks_make_room_below_the_capacity(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=100 * SIZE, free_bytes=3 * SIZE)
    for index in range(5):
        clock.now += 61.0
        add(cache, index)
    assert present(cache, range(5)) == [2, 3, 4]


def test_a_block_that_the_disk_cannot_take_is_not_begun(
    make_cache: Callable[..., DiskCache], tmp_path: Path
) -> None:
    cache = make_cache(capacity_bytes=100 * SIZE, free_bytes=2 * SIZE)
    paths = [add(cache, index) for index in range(2)]
    with pytest.raises(OSError, match="No space left"):
        cache.add(make_key(2), SIZE, lambda _path: pytest.fail("it was begun"))
    assert all(path.exists() for path in paths), "they were just handed out"
    assert cache.used_bytes == 2 * SIZE
    cache.remove(make_key(0))
    assert add(cache, 2).exists()


def test_downloads_under_way_count_as_room_that_is_taken(
    make_cache: Callable[..., DiskCache],
) -> None:
    cache = make_cache(capacity_bytes=100 * SIZE, free_bytes=SIZE)

    def download(path: Path) -> None:
        with pytest.raises(OSError, match="No space left"):
            add(cache, 2)
        write(path, content(1))

    cache.add(make_key(1), SIZE, download)
    assert present(cache, range(3)) == [1]


@pytest.mark.parametrize(
    ("num_bytes", "keep_bytes", "left"),
    [
        (SIZE, 0, [1, 2]),
        (SIZE + 1, 0, [2]),
        (3 * SIZE, SIZE, [2]),
        (3 * SIZE, SIZE + 1, [1, 2]),
        (SIZE, 3 * SIZE, [0, 1, 2]),
    ],
)
def test_trimming_evicts_the_oldest_but_leaves_what_is_to_be_kept(
    num_bytes: int, keep_bytes: int, left: list[int], make_cache: Callable[..., DiskCache]
) -> None:
    cache = make_cache()
    for index in range(3):
        add(cache, index)
        cache.note_read(make_key(index))
    freed_bytes = cache.trim(num_bytes, keep_bytes=keep_bytes)
    assert present(cache, range(3)) == left
    assert freed_bytes == (3 - len(left)) * SIZE == 3 * SIZE - cache.used_bytes


def test_trimming_leaves_what_is_about_to_be_read(make_cache: Callable[..., DiskCache]) -> None:
    cache = make_cache()
    for index in range(2):
        add(cache, index)
    cache.note_read(make_key(1))
    assert cache.trim(2 * SIZE, keep_bytes=0) == SIZE
    assert present(cache, range(2)) == [0]


def test_counts_hits_misses_evictions_and_damage(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache(capacity_bytes=SIZE)
    for _ in range(2):
        get(cache, 1)
    path = add(cache, 1)
    for _ in range(3):
        get(cache, 1)
    clock.now = 60.0
    add(cache, 2)
    assert not path.exists()
    clock.now = 120.0
    add(cache, 3)
    assert cache.stats == DiskCacheStats(
        used_bytes=SIZE, capacity_bytes=SIZE, num_hits=3, num_misses=2, num_evictions=2
    )
    for index in (4, 5):
        add(cache, index).write_bytes(b"damaged")
    restarted = make_cache(capacity_bytes=SIZE)
    assert present(restarted, range(4, 6)) == []
    assert restarted.stats.num_corrupt == 2
    assert restarted.stats.num_misses == 2


def test_same_digest_of_two_tenants_is_two_entries(make_cache: Callable[..., DiskCache]) -> None:
    cache = make_cache()
    mine = cache.add(make_key(1), SIZE, lambda path: write(path, content(1)))
    theirs = cache.add(make_key(1, "other"), SIZE, lambda path: write(path, content(1)))
    assert mine != theirs
    cache.remove(make_key(1, "other"))
    assert mine.exists()
    assert not theirs.exists()


def test_removed_entry_is_gone_from_the_disk(make_cache: Callable[..., DiskCache]) -> None:
    cache = make_cache()
    path = add(cache, 1)
    cache.remove(make_key(1))
    cache.remove(make_key(1))
    assert not path.exists()
    assert get(cache, 1) is None
    assert cache.used_bytes == 0


def test_failed_download_leaves_nothing(
    make_cache: Callable[..., DiskCache], tmp_path: Path
) -> None:
    cache = make_cache()

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError, match="connection lost"):
        cache.add(make_key(1), SIZE, fail)
    assert cache.used_bytes == 0
    assert list((tmp_path / "cache").iterdir()) == []


def test_keeps_its_entries_and_their_order_over_a_restart(
    make_cache: Callable[..., DiskCache], clock: Clock
) -> None:
    cache = make_cache()
    for index in range(3):
        os.utime(add(cache, index), (1000.0 + index,) * 2)
    get(cache, 0)  # now the youngest
    restarted = make_cache()
    assert restarted.used_bytes == 3 * SIZE
    add(restarted, 3)
    assert present(restarted, range(4)) == [0, 2, 3]


@pytest.mark.parametrize("damage", [b"", content(1)[:-1], content(1)[:-1] + b"\0", content(2)])
def test_file_damaged_between_two_runs_is_dropped(
    damage: bytes, make_cache: Callable[..., DiskCache]
) -> None:
    path = add(make_cache(), 1)
    path.write_bytes(damage)
    restarted = make_cache()
    assert get(restarted, 1) is None
    assert not path.exists()
    assert restarted.used_bytes == 0


def test_directory_cleared_by_someone_is_a_miss(make_cache: Callable[..., DiskCache]) -> None:
    cache = make_cache()
    add(cache, 1).unlink()
    assert get(cache, 1) is None
    assert cache.used_bytes == 0


def test_process_killed_before_the_rename_leaves_no_entry(
    make_cache: Callable[..., DiskCache], tmp_path: Path
) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from loraplex.adapters.disk_cache import DiskCache\n"
        "from loraplex.adapters.identity import AdapterKey\n"
        "pathlib.Path.replace = lambda *paths: os._exit(9)\n"
        "cache = DiskCache(pathlib.Path(sys.argv[1]), 10_000)\n"
        "cache.add(AdapterKey('t', 'd'), 1, lambda path: path.write_bytes(b'x'))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, check=False).returncode == 9
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".partial"]
    assert make_cache().used_bytes == 0
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_sees_the_finished_files_in_the_order_of_use(
    make_cache: Callable[..., DiskCache], tmp_path: Path
) -> None:
    cache = make_cache()
    names = []
    for index, used_at in enumerate((30.0, 10.0, 20.0)):
        path = add(cache, index)
        os.utime(path, (0.0, used_at))
        names.append(path.name)
    (tmp_path / "cache" / "other.partial").write_bytes(b"x")
    (tmp_path / "cache" / names[0].replace(names[0][:3], "new")).symlink_to("nowhere")
    found = list_cached_files(tmp_path / "cache")
    assert list(found) == [names[1], names[2], names[0]]
    assert list(found.values()) == [CachedFile(SIZE, used_at) for used_at in (10.0, 20.0, 30.0)]


def test_names_tell_nothing_and_only_the_owner_may_look(
    make_cache: Callable[..., DiskCache], tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    cache = make_cache()
    path = cache.add(AdapterKey("../secret-tenant", "x"), 1, lambda path: write(path, b"x"))
    assert path.parent == tmp_path / "cache"
    assert "secret" not in path.name
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_refuses_a_directory_of_another_user(
    make_cache: Callable[..., DiskCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(PermissionError, match="another user"):
        make_cache()
