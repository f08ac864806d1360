"""A follower on another host reads the bytes of rank 0's files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Event

import pytest

from loraplex.engine.ranks.adapter_files import SentFiles
from loraplex.engine.ranks.file_sender import PIECE_BYTES, FileSender
from support.waiting import wait_for

Ends = tuple["Connection[bytes, bytes]", "Connection[bytes, bytes]"]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def test_files_of_all_sizes_arrive_in_their_order(tmp_path: Path, ends: Ends) -> None:
    sender, files = FileSender(ends[0], lambda: None), SentFiles(ends[1])
    sizes = (0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 17)
    paths = [tmp_path / str(size) for size in sizes]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(os.urandom(size))
        sender.send(path)
    for path in paths:
        with files.open(str(path)) as opened:
            assert opened.read_bytes() == path.read_bytes()
            assert opened.read_bytes() == path.read_bytes(), "it can be opened again"
        assert not opened.exists()


def test_a_missing_file_is_missing_and_the_next_one_arrives(tmp_path: Path, ends: Ends) -> None:
    sender, files = FileSender(ends[0], lambda: None), SentFiles(ends[1])
    there = tmp_path / "there"
    there.write_bytes(b"bytes")
    sender.send(tmp_path / "gone")
    sender.send(there)
    with pytest.raises(FileNotFoundError), files.open("gone"):
        raise AssertionError
    with files.open("there") as opened:
        assert opened.read_bytes() == b"bytes"


def test_a_connection_that_ends_within_a_file_is_an_error_at_both_ends(
    tmp_path: Path, ends: Ends
) -> None:
    lost = Event()
    sender, files = FileSender(ends[0], lost.set), SentFiles(ends[1])
    path = tmp_path / "large"
    path.write_bytes(bytes(8 * PIECE_BYTES))
    sender.send(path)
    wait_for(ends[1].poll)
    sender.close()
    with pytest.raises((EOFError, OSError)), files.open(str(path)):
        raise AssertionError
    assert lost.wait(60)
