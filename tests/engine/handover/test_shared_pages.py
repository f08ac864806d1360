"""Pages that pass through memory which engines of one host share, and those that nobody reads."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.handover import shared_pages
from loraplex.engine.handover.shared_pages import UNREAD_SECONDS, SharedPages, memory_domain
from loraplex.engine.messages import GroupPages, PagesPlace, PrefixPiece

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is a call of Linux")

KEY = AdapterKey("acme", "0" * 64)
PIECE = PrefixPiece(
    "r",
    [
        GroupPages([0, 1], [b"first tensor", b"second"]),
        GroupPages([], []),
        GroupPages([1], [b"", b"third"]),
    ],
    is_last=True,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pages(clock: Clock) -> Iterator[SharedPages]:
    pages = SharedPages(clock)
    yield pages
    pages.close()


def sent(pages: SharedPages, adapter: AdapterKey | None = None) -> tuple[PrefixPiece, PagesPlace]:
    piece = pages.send(PIECE, adapter)
    assert piece.place is not None
    assert not any(group.pages for group in piece.groups), "they are in one place only"
    return piece, piece.place


def content_of(place: PagesPlace) -> bytes:
    return Path(f"/proc/self/fd/{place.descriptor}").read_bytes()


def test_what_is_received_is_what_was_sent_and_its_memory_is_free(pages: SharedPages) -> None:
    piece, place = sent(pages)
    assert pages.num_unread_bytes == len(content_of(place)) > 0
    assert pages.receive(piece) == PIECE
    assert content_of(place) == b""
    pages.poll()
    assert pages.num_unread_bytes == 0
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(place.descriptor)


def test_another_process_receives_them(pages: SharedPages) -> None:
    _, place = sent(pages)
    code = f"""
from loraplex.engine.messages import GroupPages, PagesPlace, PrefixPiece
from loraplex.engine.handover.shared_pages import SharedPages
groups = [GroupPages([0, 1], []), GroupPages([], []), GroupPages([1], [])]
print(SharedPages(lambda: 0.0).receive(PrefixPiece("r", groups, True, {place!r})))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == repr(PIECE)
    pages.poll()
    assert pages.num_unread_bytes == 0


def test_pages_end_with_a_process_that_is_killed() -> None:
    code = """
import sys, time
from loraplex.engine.messages import GroupPages, PrefixPiece
from loraplex.engine.handover.shared_pages import SharedPages
pages = SharedPages(time.monotonic)
print(pages.send(PrefixPiece("r", [GroupPages([0], [b"page"])], True), None).place, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        printed = child.stdout.readline()
        path = Path(f"/proc/{child.pid}/fd/{printed.split('descriptor=')[1].split(',')[0]}")
        assert path.read_bytes().endswith(b"page")
        target = os.readlink(path)
        child.kill()
    assert not path.exists()
    assert "memfd:" in target, "it has no name by which it could stay"


def test_nothing_but_the_file_that_was_sent_is_read_or_emptied(
    pages: SharedPages, tmp_path: Path
) -> None:
    piece, place = sent(pages)
    _, other = sent(pages)
    victim = tmp_path / "victim"
    victim.write_bytes(secrets.token_bytes(32) + bytes(23))
    pipe = os.pipe()
    with victim.open("rb+") as file:
        wrong = [
            replace(place, nonce=secrets.token_bytes(32)),
            replace(place, nonce=b""),
            replace(place, descriptor=other.descriptor),
            replace(place, descriptor=file.fileno()),
            replace(place, descriptor=pipe[0]),
            replace(place, descriptor=10_000),
            replace(place, process_id=-1),
            replace(place, sizes=[[12, 6], [], [0, 6]]),
            replace(place, sizes=[[12, 12], [], [-6, 5]]),
            replace(place, sizes=[[23]]),
        ]
        for each in wrong:
            received = pages.receive(replace(piece, place=each))
            assert (received.groups, received.is_last, received.place) == ([], True, None)
            assert content_of(place).startswith(place.nonce)
    for end in pipe:
        os.close(end)
    assert len(victim.read_bytes()) == 55
    assert content_of(other).startswith(other.nonce)


def test_what_nobody_reads_is_erased_after_a_while(pages: SharedPages, clock: Clock) -> None:
    piece, place = sent(pages)
    with Path(f"/proc/self/fd/{place.descriptor}").open("rb") as file:
        clock.now = UNREAD_SECONDS - 1
        pages.poll()
        assert pages.num_unread_bytes > 0
        clock.now = UNREAD_SECONDS
        pages.poll()
        assert file.read() == b""
    assert pages.num_unread_bytes == 0
    assert pages.receive(piece).groups == []


def test_a_deletion_erases_the_pages_of_its_adapter_alone(pages: SharedPages) -> None:
    piece, _ = sent(pages, KEY)
    other, _ = sent(pages, AdapterKey("acme", "1" * 64))
    base, _ = sent(pages)
    pages.forget(KEY)
    assert pages.receive(piece).groups == []
    assert pages.receive(other) == PIECE
    assert pages.receive(base) == PIECE


def test_without_room_pages_stay_in_the_message(
    pages: SharedPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, place = sent(pages)
    monkeypatch.setattr(shared_pages, "MAX_UNREAD_BYTES", 2 * len(content_of(place)) - 1)
    assert pages.send(PIECE, None) is PIECE
    assert pages.receive(first) == PIECE
    assert pages.send(PIECE, None).place is not None, "what was read makes room"


def test_without_memory_pages_stay_in_the_message(
    pages: SharedPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    assert pages.send(PIECE, None) is PIECE


def test_an_end_without_pages_needs_no_memory(pages: SharedPages) -> None:
    end = PrefixPiece("r", [], is_last=True)
    assert pages.send(end, None) is end


def test_the_domain_is_that_of_the_host_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    own = memory_domain()
    assert own is not None
    assert memory_domain() == own
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert memory_domain() not in (None, own)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory_domain() is None
