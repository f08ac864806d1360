"""The contents of an upload's staging file, whatever happens to its client."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from loraplex.adapters.errors import StorageFull
from loraplex.api.adapters import staging as staging_module
from loraplex.api.adapters.staging import Staging
from loraplex.platform.base import utc_now
from support.synced import record_synced


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "uploads")


def append(staging: Staging, offset: int, chunks: Callable[[], AsyncIterator[bytes]]) -> None:
    asyncio.run(staging.append("tenant", "one", offset, chunks()))


async def three_chunks() -> AsyncIterator[bytes]:
    for letter in b"abc":
        yield bytes([letter]) * 5


async def breaks_after_one() -> AsyncIterator[bytes]:
    yield b"12345"
    raise ConnectionAbortedError


def test_parts_are_put_together(staging: Staging) -> None:
    append(staging, 0, three_chunks)
    append(staging, 15, three_chunks)
    expected = b"aaaaabbbbbccccc" * 2
    assert staging.weights_path("one").read_bytes() == expected
    assert staging.num_bytes("one") == 30
    assert staging.sha256("one") == hashlib.sha256(expected).hexdigest()


def test_an_appended_file_keeps_its_name_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = record_synced(monkeypatch)
    staging = Staging(tmp_path / "uploads")
    append(staging, 0, three_chunks)
    path = staging.weights_path("one")
    assert synced[-3:] == [tmp_path, path, path.parent]


def test_what_came_before_a_break_is_kept(staging: Staging) -> None:
    append(staging, 0, three_chunks)
    with pytest.raises(ConnectionAbortedError):
        append(staging, 15, breaks_after_one)
    assert staging.weights_path("one").read_bytes() == b"aaaaabbbbbccccc12345"


def test_bytes_behind_the_acknowledged_ones_are_dropped(staging: Staging) -> None:
    append(staging, 0, three_chunks)
    append(staging, 5, one_chunk)
    assert staging.weights_path("one").read_bytes() == b"aaaaa12345"


def test_an_upload_is_measured_while_it_is_discarded(staging: Staging) -> None:
    """As the budget measures one tenant's upload while the examination of another's ends."""
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            staging.weights_path("one").write_bytes(b"12345")
            staging.discard("one")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert {staging.num_bytes("one") for _ in range(20_000)} <= {0, 5}
    finally:
        is_over.set()
        thread.join()


async def one_chunk() -> AsyncIterator[bytes]:
    yield b"12345"


def test_nothing_is_left_of_a_discarded_upload(staging: Staging, tmp_path: Path) -> None:
    append(staging, 0, three_chunks)
    staging.config_path("one").write_text("{}")
    staging.discard("one")
    staging.discard("one")
    assert staging.num_bytes("one") == 0
    assert list((tmp_path / "uploads").iterdir()) == []


@pytest.mark.parametrize("newest", ["weights_path", "config_path", "block_path"])
def test_an_upload_is_as_old_as_its_newest_file(newest: str, staging: Staging) -> None:
    then = utc_now() - timedelta(hours=1)
    for kind in ("weights_path", "config_path", "block_path"):
        path: Path = getattr(staging, kind)("one")
        path.touch()
        if kind != newest:
            os.utime(path, (0, 0))
    assert staging.list_uploads(then) == set()
    assert staging.list_uploads(utc_now() + timedelta(hours=1)) == {"one"}


def test_the_folder_is_private(staging: Staging, tmp_path: Path) -> None:
    append(staging, 0, three_chunks)
    assert (tmp_path / "uploads").stat().st_mode & 0o777 == 0o700
    assert staging.weights_path("one").stat().st_mode & 0o777 == 0o600


def test_a_cancelled_request_leaves_what_it_sent_once(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops cancels its requests; the thread that writes goes on."""
    is_writing, may_write = threading.Event(), threading.Event()
    write_all = staging_module._write_all

    def slow_write_all(descriptor: int, data: bytes) -> None:
        is_writing.set()
        assert may_write.wait(60)
        write_all(descriptor, data)

    async def run() -> None:
        monkeypatch.setattr(staging_module, "_write_all", slow_write_all)
        appending = asyncio.create_task(staging.append("tenant", "one", 0, three_chunks()))
        await asyncio.to_thread(is_writing.wait, 60)
        appending.cancel()
        await asyncio.sleep(0.1)
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await appending

    asyncio.run(run())
    assert staging.weights_path("one").read_bytes() == b"aaaaa"


def test_a_piece_that_a_full_disk_cut_off_is_not_written_again(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all = staging_module._write_all

    def write_part(descriptor: int, data: bytes) -> None:
        write_all(descriptor, data[:2])
        if data:
            monkeypatch.setattr(staging_module, "_write_all", write_all)  # now there is room again
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(staging_module, "_write_all", write_part)
    with pytest.raises(StorageFull):
        append(staging, 0, three_chunks)
    assert staging.weights_path("one").read_bytes() == b"aa"
