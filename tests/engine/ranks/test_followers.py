"""What rank 0 hears of its followers."""

from __future__ import annotations

from multiprocessing.connection import Pipe

import pytest
import torch

from loraplex.adapters.errors import AdapterUnavailable
from loraplex.engine.errors import RankLost
from loraplex.engine.ranks.commands import DropAdapters, JobDone, Joined, RunChunks
from loraplex.engine.ranks.followers import Followers, Jobs
from loraplex.engine.ranks.rank_pipe import FollowerPipe, follower_pipe, leader_pipe
from loraplex.engine.transfers import HostCopy


def connect(count: int) -> tuple[Followers, list[FollowerPipe]]:
    ends = [Pipe() for _ in range(count)]
    theirs = [follower_pipe(end) for _, end in ends]
    followers = Followers([leader_pipe(end) for end, _ in ends], lambda: None)
    for pipe in theirs:
        pipe.send(Joined("here"))
    followers.await_joined()
    return followers, theirs


def begin(followers: Followers) -> Jobs:
    return followers.begin(lambda job: DropAdapters(job, ()))


def test_every_follower_gets_the_commands_in_the_same_order() -> None:
    followers, theirs = connect(3)
    followers.tell(RunChunks(()))
    begin(followers)
    begin(followers)
    for pipe in theirs:
        received = [pipe.receive() for _ in range(3)]
        assert received == [RunChunks(()), DropAdapters(1, ()), DropAdapters(2, ())]


def test_a_job_is_done_when_all_followers_have_done_it() -> None:
    followers, theirs = connect(2)
    first, second = begin(followers), begin(followers)
    for pipe in theirs:
        pipe.send(JobDone(2))
    second.wait()
    theirs[0].send(JobDone(1))
    theirs[1].send(JobDone(1, "not finite"))
    with pytest.raises(AdapterUnavailable, match="not finite"):
        first.wait()


def test_a_file_that_a_follower_does_not_find_is_missing() -> None:
    followers, theirs = connect(1)
    job = begin(followers)
    theirs[0].send(JobDone(1, "no such file", is_missing=True))
    with pytest.raises(FileNotFoundError):
        job.wait()


def test_a_lost_follower_ends_all_jobs_and_refuses_all_commands() -> None:
    followers, theirs = connect(2)
    job = begin(followers)
    theirs[0].send(JobDone(1))
    theirs[1].close()
    with pytest.raises(RankLost, match="Rank 2"):
        job.wait()
    for call in (followers.check, lambda: followers.tell(RunChunks(())), lambda: begin(followers)):
        with pytest.raises(RankLost, match="Rank 2"):
            call()


def test_a_follower_that_ends_before_it_has_joined_is_lost() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(RankLost, match="before it had started"):
        Followers([leader_pipe(ours)], lambda: None).await_joined()


def test_closing_ends_the_followers_connections() -> None:
    followers, theirs = connect(1)
    followers.close()
    with pytest.raises((EOFError, OSError)):
        theirs[0].receive()
    followers.check()


def test_what_a_device_computes_after_a_follower_was_lost_is_not_read() -> None:
    """An exchange that waits for the lost rank is aborted, and the step then computes anything."""
    followers, _ = connect(1)
    found = HostCopy(torch.tensor([True]))
    found.check_with(followers.check)
    assert found.read().tolist() == [True]
    seen: list[str] = []

    def abort() -> None:
        with pytest.raises(RankLost):
            found.read()
        seen.append("aborted")

    followers.on_lost(abort)
    followers.lose(1, "No progress of rank 1.")
    assert seen == ["aborted"]
