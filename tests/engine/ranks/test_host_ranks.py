"""The ranks of one host are started together, end together and are started again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from loraplex.engine.ranks import host_ranks, rank_process
from loraplex.engine.ranks.group_secret import random_secret
from loraplex.engine.ranks.host_ranks import HostRanks, Membership
from loraplex.engine.shards.rank_address import RankAddress
from support.waiting import wait_for

SECRET = random_secret()
MEMBERSHIP = Membership(RankAddress("10.0.0.1", 7080), SECRET)
RANK = """
import os, select, sys
secret = sys.stdin.buffer.read(32)
with open(os.environ["SEEN"], "a") as seen:
    print(os.getpid(), secret.hex(), *sys.argv[1:], file=seen)
while "LIVES" in os.environ and not select.select([sys.stdin], [], [], 0.05)[0]:
    print("alive", flush=True)
sys.stdin.buffer.read()
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that note what they were told."""
    monkeypatch.setattr(rank_process, "COMMAND", (sys.executable, "-c", RANK))
    monkeypatch.setattr(host_ranks, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(host_ranks, "LOOK_SECONDS", 0.05)


@contextmanager
def running(ranks: HostRanks) -> Iterator[None]:
    thread = Thread(target=ranks.run)
    thread.start()
    try:
        yield
    finally:
        ranks.stop()
        thread.join()


def read(seen: Path) -> list[list[str]]:
    return [line.split() for line in seen.read_text().splitlines()] if seen.exists() else []


def test_ranks_are_told_the_secret_and_start_together_again_when_one_has_ended(
    tmp_path: Path,
) -> None:
    seen = tmp_path / "seen"
    ranks = HostRanks([2, 3], lambda: MEMBERSHIP, {**os.environ, "SEEN": str(seen)})
    with running(ranks):
        wait_for(lambda: len(read(seen)) == 2)
        told = sorted(words[1:] for words in read(seen))
        address = str(MEMBERSHIP.address)
        assert told == [[SECRET.hex(), address, rank, "rank-0"] for rank in ("2", "3")]
        os.kill(int(read(seen)[0][0]), signal.SIGKILL)
        wait_for(lambda: len(read(seen)) == 4)
    pids = {int(words[0]) for words in read(seen)}
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_wait_until_it_is_known_where_they_join(tmp_path: Path) -> None:
    seen, asked = tmp_path / "seen", iter([None, None, MEMBERSHIP])
    ranks = HostRanks([1], lambda: next(asked), {**os.environ, "SEEN": str(seen)})
    with running(ranks):
        wait_for(lambda: len(read(seen)) == 1)


def test_a_rank_that_was_alive_and_does_not_run_any_more_is_replaced(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    environment = {**os.environ, "SEEN": str(seen), "LIVES": ""}
    with running(HostRanks([1], lambda: MEMBERSHIP, environment)):
        wait_for(lambda: len(read(seen)) == 1)
        ((pid, *_),) = read(seen)
        time.sleep(0.5)  # it shows that it is alive
        os.kill(int(pid), signal.SIGSTOP)
        wait_for(lambda: len(read(seen)) == 2)
    assert not Path(f"/proc/{pid}").exists()
