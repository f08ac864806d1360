"""Only a process that knows the group's secret joins it, and each rank joins once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import InvalidParameter, RankLost, RankRefused
from loraplex.engine.ranks import rank_handshake, rank_listener
from loraplex.engine.ranks.group_secret import random_secret, secret_of_file
from loraplex.engine.ranks.rank_handshake import Purpose, RankLink, join
from loraplex.engine.ranks.rank_listener import RankListener
from loraplex.engine.shards.rank_address import LOOPBACK, parse_rank_address

SECRET = random_secret()
ONE, TWO = RankLink(1, Purpose.COMMANDS), RankLink(2, Purpose.COMMANDS)


class Joining:
    """A listener that wants ranks 1 and 2, and the other ends of its connections."""

    def __init__(self, listener: RankListener, resources: ExitStack) -> None:
        self.listener = listener
        self._resources = resources
        self._threads = resources.enter_context(ThreadPoolExecutor())

    def connect(self) -> socket.socket:
        return self._resources.enter_context(socket.create_connection(self.listener.address))

    def join(self, link: RankLink, secret: bytes = SECRET) -> socket.socket:
        """A connection that was admitted."""
        connected = self.connect()
        join(connected, link, secret)
        return connected

    def begin(self) -> Future[dict[RankLink, socket.socket]]:
        """Admit all that is wanted, in a thread."""
        return self._threads.submit(self._admit_all)

    def _admit_all(self) -> dict[RankLink, socket.socket]:
        found = self.listener.admit_all(lambda: None)
        for connected in found.values():
            self._resources.enter_context(connected)
        return found


@pytest.fixture
def joining() -> Iterator[Joining]:
    with RankListener(LOOPBACK, SECRET, [ONE, TWO]) as listener, ExitStack() as resources:
        yield Joining(listener, resources)


def test_the_connections_of_all_ranks_carry_what_is_sent_after_the_handshake(
    joining: Joining,
) -> None:
    admitting = joining.begin()
    for link in (TWO, ONE):
        joining.join(link).sendall(bytes([link.rank]))
    found = admitting.result()
    assert {link: each.recv(8) for link, each in found.items()} == {ONE: b"\1", TWO: b"\2"}


def test_a_wrong_secret_is_refused_at_both_ends_and_the_others_join(
    joining: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    admitting = joining.begin()
    with pytest.raises(RankRefused, match="its secret is another one"):
        joining.join(ONE, random_secret())
    joining.join(ONE)
    joining.join(TWO)
    assert set(admitting.result()) == {ONE, TWO}
    (refusal,) = [record for record in caplog.records if record.message == "rank_refused"]
    assert vars(refusal)["error"] == "its secret is another one"


@pytest.mark.parametrize("link", [ONE, RankLink(3, Purpose.COMMANDS), RankLink(2, Purpose.FILES)])
def test_a_rank_that_has_joined_and_one_that_is_not_wanted_are_refused(
    joining: Joining, link: RankLink
) -> None:
    admitting = joining.begin()
    first = joining.join(ONE)
    with pytest.raises(RankRefused, match="joined already"):
        joining.join(link)
    joining.join(TWO)
    found = admitting.result()
    first.sendall(b"first")
    assert found[ONE].recv(8) == b"first"


def test_strangers_that_are_silent_or_send_garbage_do_not_delay_the_ranks(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_handshake, "HANDSHAKE_SECONDS", 60.0)
    silent = [joining.connect() for _ in range(3)]
    garbage = joining.connect()
    garbage.sendall(os.urandom(1 << 16))
    admitting = joining.begin()
    joining.join(ONE)
    joining.join(TWO)
    assert set(admitting.result()) == {ONE, TWO}
    for each in [*silent, garbage]:
        each.close()


def test_a_proof_that_was_heard_does_not_admit_another_connection(joining: Joining) -> None:
    """The same bytes answer another nonce."""
    admitting = joining.begin()
    heard = []

    class Recorder(socket.socket):
        def sendall(self, data: bytes) -> None:  # type: ignore[override]
            heard.append(data)
            super().sendall(data)

    with Recorder() as recorder:
        recorder.connect(joining.listener.address)
        with pytest.raises(RankRefused, match="joined already"):
            join(recorder, RankLink(9, Purpose.COMMANDS), SECRET)
    with joining.connect() as replaying:
        replaying.sendall(heard[0])
        assert replaying.recv(32)
        assert replaying.recv(1) == b"", "rank 0 has said no more than its nonce"
    joining.join(ONE)
    joining.join(TWO)
    assert set(admitting.result()) == {ONE, TWO}


def test_a_follower_refuses_a_listener_that_does_not_know_the_secret() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(32 + 1 + 32))  # a nonce, "joined" and a proof
        with pytest.raises(RankRefused, match="does not know the secret"):
            join(ours, ONE, SECRET)


def test_a_rank_that_never_joins_is_named(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_listener, "JOIN_SECONDS", 0.5)
    admitting = joining.begin()
    joining.join(ONE)
    with pytest.raises(RankLost, match=r"^No rank 2 has joined"):
        admitting.result()


def test_a_rank_that_joins_and_ends_before_the_others_have_joined_is_lost(
    joining: Joining,
) -> None:
    admitting = joining.begin()
    first = joining.join(ONE)
    first.sendall(b"what nobody has read")
    first.close()
    with pytest.raises(RankLost, match="Rank 1 ended"):
        admitting.result()


def test_what_ends_meanwhile_ends_the_wait(joining: Joining) -> None:
    def check() -> None:
        raise RankLost("Rank 1 ended before it had started.")

    with pytest.raises(RankLost, match="Rank 1 ended"):
        joining.listener.admit_all(check)


def test_a_secret_has_to_be_readable_and_long(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(InvalidParameter, match="cannot be read"):
        secret_of_file(str(file))
    file.write_text("too short")
    with pytest.raises(InvalidParameter, match="less than 32 characters"):
        secret_of_file(str(file))
    file.write_text("x" * 32)
    with_end_of_line = tmp_path / "copied"
    with_end_of_line.write_text("x" * 32 + "\n")
    assert secret_of_file(str(file)) == secret_of_file(str(with_end_of_line))


@pytest.mark.parametrize("address", ["10.0.0.1", ":7080", "10.0.0.1:0", "::1:7080", "0.0.0.0:7080"])
def test_an_address_that_others_cannot_reach_is_refused(address: str) -> None:
    with pytest.raises(InvalidParameter, match="must be"):
        parse_rank_address(address, "rank_address")


@pytest.mark.parametrize(
    ("param", "settings"),
    [
        ("num_local_ranks", {"num_local_ranks": 3}),
        ("rank_address", {"num_local_ranks": 1, "rank_secret": "file"}),
        ("rank_secret", {"num_local_ranks": 1, "rank_address": "10.0.0.1:7080"}),
        ("rank_address", {"rank_address": "10.0.0.1:7080"}),
        ("rank_secret", {"num_local_ranks": 2, "rank_secret": "file"}),
    ],
)
def test_options_of_several_hosts_need_each_other(param: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        EngineConfig("base", tensor_parallel_size=2, **settings)  # type: ignore[arg-type]
    assert refusal.value.param == param
