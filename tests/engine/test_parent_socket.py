"""The engine's end of its socket: waiting, buffering, and no loss of messages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from loraplex.engine.process.frames import FrameReader, Frames, pack
from loraplex.engine.process.parent_socket import MAX_UNSENT_MESSAGES, ParentGone, ParentSocket

Ends = tuple[ParentSocket, socket.socket]
BIG = 1 << 20


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The engine's, and the parent's."""
    theirs, ours = socket.socketpair()
    ours.settimeout(20)
    with ours, ParentSocket(theirs) as engine:
        yield engine, ours


def read(parent: socket.socket, number: int) -> list[Frames]:
    received = FrameReader()
    messages: list[Frames] = []
    while len(messages) < number:
        data = parent.recv(1 << 16)
        assert data
        received.add(data)
        while (frames := received.next()) is not None:
            messages.append(frames)
    assert not received
    return messages


def test_everything_that_has_arrived_is_received_whatever_its_parts(ends: Ends) -> None:
    engine, parent = ends
    messages = [(b"a", b""), (b"b", b"x" * 70_000), (b"c", b"y")]
    sent = b"".join(map(pack, messages))
    parent.sendall(sent[:5])
    assert list(engine.receive(0)) == []
    parent.sendall(sent[5:])
    assert list(engine.receive(0)) == messages
    assert list(engine.receive(1)) == []


def test_who_waits_is_woken_by_a_message(ends: Ends) -> None:
    engine, parent = ends
    threading.Timer(0.05, parent.sendall, [pack((b"a", b"b"))]).start()
    assert list(engine.receive(60_000)) == [(b"a", b"b")]


def test_what_the_parent_does_not_take_yet_holds_up_nobody_and_arrives_in_order(ends: Ends) -> None:
    engine, parent = ends
    messages = [(b"%d" % number, b"x" * BIG) for number in range(3)]
    for frames in messages:
        engine.send(frames)
    reading = threading.Thread(target=lambda: taken.extend(read(parent, 3)))
    taken: list[Frames] = []
    reading.start()
    while reading.is_alive():  # what is unsent goes on while the engine looks for messages
        assert list(engine.receive(10)) == []
    assert taken == messages


def test_a_parent_that_takes_nothing_holds_the_engine_up_in_the_end(ends: Ends) -> None:
    engine, parent = ends
    engine.send((b"big", b"x" * BIG))
    for _ in range(MAX_UNSENT_MESSAGES - 1):
        engine.send((b"small", b""))
    held_up = threading.Thread(target=engine.send, args=[(b"one too many", b"")], daemon=True)
    held_up.start()
    held_up.join(timeout=0.2)
    assert held_up.is_alive()
    messages: list[Frames] = []
    reading = threading.Thread(
        target=lambda: messages.extend(read(parent, MAX_UNSENT_MESSAGES + 1))
    )
    reading.start()
    held_up.join()
    while reading.is_alive():
        assert list(engine.receive(10)) == []
    assert messages[0] == (b"big", b"x" * BIG)
    assert messages[1:-1] == [(b"small", b"")] * (MAX_UNSENT_MESSAGES - 1)
    assert messages[-1] == (b"one too many", b"")


def test_the_last_words_leave_before_the_end() -> None:
    theirs, ours = socket.socketpair()
    taken: list[Frames] = []
    reading = threading.Thread(target=lambda: taken.extend(read(ours, 1)))
    with ours:
        with ParentSocket(theirs) as engine:
            engine.send((b"last", b"x" * BIG))
            reading.start()
        reading.join()
    assert taken == [(b"last", b"x" * BIG)]


def test_a_parent_that_is_gone_is_told_by_receiving_and_holds_nobody_up(ends: Ends) -> None:
    engine, parent = ends
    parent.sendall(pack((b"before", b"")))
    parent.close()
    for _ in range(2 * MAX_UNSENT_MESSAGES):
        engine.send((b"a", b"x" * 1000))
    received = engine.receive(60_000)
    assert next(received) == (b"before", b"")
    with pytest.raises(ParentGone):
        next(received)
