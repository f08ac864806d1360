"""Reads start by urgency, and a read that found no room is not overtaken."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.reading import ReadQueue
from loraplex.adapters.record import Record
from support.blocks import make_key
from support.manager import FakeBlock, FakeHost, ManualLoaders

A, B, C, IN_USE = (make_key(name) for name in ("a", "b", "c", "in use"))


class Reads:
    """A queue over host memory for 4 elements, all of which are in use."""

    def __init__(self) -> None:
        self.host = FakeHost(4)
        self.loaders = ManualLoaders()
        self.records: dict[AdapterKey, Record[FakeBlock]] = {}
        self.queue: ReadQueue[FakeBlock] = ReadQueue(
            self.host, self.loaders, lambda record: (0, record.order)
        )
        self.host.files[Path("in use")] = 4
        self.host.read(IN_USE, Path("in use"))

    def add(self, key: AdapterKey, size: int, order: int) -> None:
        path = Path(key.digest)
        self.host.files[path] = size
        self.records[key] = Record(key, order=order, paths=(path,))
        self.queue.add(self.records[key])

    def run(self) -> list[AdapterKey]:
        """Begin what may begin, end it, and say what arrived."""
        self.queue.start()
        self.loaders.run_all()
        return self.finished()

    def finished(self) -> list[AdapterKey]:
        return [record.key for record, _ in self.queue.take_finished()]


def test_a_refused_read_is_tried_again_when_there_is_new_room_and_not_before() -> None:
    reads = Reads()
    reads.add(A, 4, order=1)
    assert reads.run() == []
    reads.queue.start()
    assert len(reads.loaders) == 0
    reads.host.release(IN_USE)
    reads.queue.look_again()
    assert reads.run() == [A]
    assert len(reads.queue) == 0


def test_a_refused_read_is_tried_again_alone_and_stays_first() -> None:
    reads = Reads()
    reads.add(A, 4, order=1)
    reads.run()
    reads.add(B, 1, order=2)
    reads.queue.start()
    assert len(reads.loaders) == 0
    reads.queue.look_again()
    reads.queue.start()
    assert len(reads.loaders) == 1
    reads.loaders.run()
    reads.queue.take_finished()
    reads.queue.start()
    assert len(reads.loaders) == 0, "refused again, but still before B"
    reads.host.release(IN_USE)
    reads.queue.look_again()
    assert reads.run() == [A]
    reads.host.release(A)
    assert reads.run() == [B]


def test_an_earlier_request_passes_a_refused_read() -> None:
    reads = Reads()
    reads.add(B, 4, order=2)
    reads.run()
    reads.host.release(IN_USE)
    reads.add(A, 4, order=1)
    assert reads.run() == [A]


def test_a_failed_read_makes_room_for_a_refused_one() -> None:
    reads = Reads()
    reads.add(A, 4, order=1)
    reads.add(B, 4, order=2)
    reads.queue.start()
    reads.loaders.run(1)
    reads.loaders.run(0, error=OSError("unreadable"))
    assert reads.finished() == [A]
    reads.host.release(IN_USE)
    assert reads.run() == [B]


def test_which_refused_read_is_tried_next_is_decided_anew() -> None:
    reads = Reads()
    reads.add(A, 4, order=1)
    reads.add(B, 4, order=2)
    assert reads.run() == []
    assert reads.queue.blocked is reads.records[A]
    reads.records[A].order = 3
    reads.host.release(IN_USE)
    reads.queue.look_again()
    assert reads.run() == [B]


def test_a_block_that_host_memory_has_is_not_read_again() -> None:
    reads = Reads()
    reads.host.release(IN_USE)
    reads.add(IN_USE, 4, order=1)
    reads.queue.start()
    assert len(reads.loaders) == 0
    assert reads.finished() == [IN_USE]
    assert reads.host.in_use == {IN_USE}


def test_a_read_that_was_not_begun_can_be_discarded() -> None:
    reads = Reads()
    reads.host.release(IN_USE)
    for order, key in enumerate((A, B, C)):
        reads.add(key, 1, order=order)
    reads.queue.discard(B)
    assert reads.run() == [A, C]


def test_two_reads_at_a_time_are_begun_and_each_is_taken_when_it_ends() -> None:
    reads = Reads()
    reads.host.release(IN_USE)
    for order, key in enumerate((A, B, C)):
        reads.add(key, 1, order=order)
    reads.queue.start()
    assert (len(reads.queue), len(reads.loaders)) == (3, 2)
    assert [reads.queue.is_running(key) for key in (A, B, C)] == [True, True, False]
    reads.loaders.run(1)
    assert reads.finished() == [B]
    reads.loaders.run()
    assert reads.finished() == [A]
    assert len(reads.queue) == 1


@pytest.mark.parametrize("is_discarded", [False, True])
def test_behind_a_refused_read_two_run_at_a_time_again(is_discarded: bool) -> None:
    reads = Reads()
    reads.add(A, 4, order=1)
    assert reads.run() == []
    reads.queue.discard(B)
    assert reads.queue.blocked is reads.records[A]
    reads.host.release(IN_USE)
    if is_discarded:
        reads.queue.discard(A)
    else:
        reads.queue.look_again()
        assert reads.run() == [A]
        reads.host.release(A)
    reads.add(B, 1, order=2)
    reads.add(C, 1, order=3)
    reads.queue.start()
    assert len(reads.loaders) == 2


def test_of_two_refused_reads_the_second_is_tried_alone_too() -> None:
    reads = Reads()
    reads.add(A, 4, order=1)
    reads.add(B, 4, order=2)
    assert reads.run() == []
    reads.host.release(IN_USE)
    reads.queue.look_again()
    assert reads.run() == [A]
    reads.host.release(A)
    reads.add(C, 1, order=3)
    reads.queue.start()
    assert len(reads.loaders) == 1
    assert reads.queue.is_running(B)


def test_a_refused_read_that_is_no_longer_the_soonest_gives_way() -> None:
    reads = Reads()
    reads.queue.reorder()
    reads.add(A, 4, order=1)
    assert reads.run() == []
    reads.add(B, 1, order=2)
    reads.queue.reorder()
    assert reads.queue.blocked is reads.records[A]
    reads.records[A].order = 3
    reads.queue.reorder()
    assert reads.queue.blocked is None
