"""The rank for which the others wait is found from their signs of life, and no other is blamed."""

from __future__ import annotations

import random
from collections.abc import Callable
from multiprocessing.connection import Pipe
from threading import Event

import pytest

from loraplex.engine.heartbeat import SILENT_LOOKS
from loraplex.engine.ranks.commands import Joined
from loraplex.engine.ranks.followers import Followers
from loraplex.engine.ranks.pulse_reports import reporting_pulse
from loraplex.engine.ranks.rank_pipe import follower_pipe, leader_pipe
from loraplex.engine.ranks.rank_watch import HangWatch, _rank_0_waits
from loraplex.engine.shards.rank_place import GroupShape
from loraplex.engine.shards.rank_pulses import Pulse, RankPulses
from support.waiting import wait_for

SIZE = 4
Looks = Callable[[int], list[Pulse]]
"""From the number of a look to what it sees."""


def find(looks: Looks, most: int = SILENT_LOOKS + 1) -> list[int]:
    """What a watch finds in so many looks at most."""
    watch = HangWatch(GroupShape(SIZE, 1))
    for number in range(most):
        if found := watch.look(looks(number)):
            return found
    return []


def stopped(rank: int, num_marks: int, others: int, *, runs: bool = True) -> Looks:
    """A rank stops at some mark of its exchanges, the others go on to another and wait."""

    def look(number: int) -> list[Pulse]:
        pulses = [Pulse(3, others, number)] * SIZE
        pulses[rank] = Pulse(3, num_marks, number if runs else 0)
        return pulses

    return look


@pytest.mark.parametrize("rank", range(1, SIZE))
def test_a_follower_that_stops_in_its_own_work_is_found(rank: int) -> None:
    assert find(stopped(rank, 10, others=11)) == [rank]


@pytest.mark.parametrize("rank", range(1, SIZE))
def test_a_follower_that_stops_behind_its_part_of_an_exchange_is_found(rank: int) -> None:
    """The others have ended that exchange and wait in the next one."""
    assert find(stopped(rank, 11, others=13)) == [rank]


@pytest.mark.parametrize("rank", range(1, SIZE))
def test_a_process_that_does_not_run_is_found_in_an_exchange_of_all(rank: int) -> None:
    assert find(stopped(rank, 11, others=11, runs=False)) == [rank]


def test_all_followers_are_suspects_if_none_leaves_an_exchange_of_all() -> None:
    assert find(stopped(1, 11, others=11)) == [1, 2, 3]


def test_a_follower_that_stops_while_all_are_idle_is_found() -> None:
    def looks(number: int) -> list[Pulse]:
        pulses = [Pulse(number, 10, number)] * SIZE
        pulses[0], pulses[2] = Pulse(0, 10, 0), Pulse(7, 10, number)
        return pulses

    assert find(looks) == [2]


def test_followers_that_wait_for_rank_0_are_not_blamed() -> None:
    """The supervisor watches rank 0."""
    assert find(stopped(0, 10, others=11), most=5 * SILENT_LOOKS) == []


def test_a_slow_group_is_not_blamed() -> None:
    """Each rank shows a sign of life just before it would be missed."""
    rng, pulses = random.Random(0), [Pulse(0, 0, 0)] * SIZE
    watch = HangWatch(GroupShape(SIZE, 1))
    for number in range(1000):
        if number % (SILENT_LOOKS - 1) == 0:
            pulses = [
                Pulse(beats + rng.randrange(2), marks + 1, lives + 1)
                for beats, marks, lives in pulses
            ]
        assert watch.look(pulses) == []


def test_of_stages_a_rank_is_compared_with_those_of_its_own_stage() -> None:
    """The ranks of another stage have more layers, or fewer."""
    watch = HangWatch(GroupShape(2, 2))
    waiting = [Pulse(9, 7, 0), Pulse(9, 7, 0), Pulse(9, 3, 0), Pulse(9, 1, 0)]
    looks = [
        watch.look([pulse._replace(num_lives=time) for pulse in waiting])
        for time in range(SILENT_LOOKS + 1)
    ]
    assert looks == [[]] * SILENT_LOOKS + [[3]]


def test_rank_0_beats_while_a_stage_before_it_computes() -> None:
    waits, before = Pulse(5, 7, 1), Pulse(5, 8, 1)
    assert _rank_0_waits([waits, before], [waits, before._replace(num_marks=10)])
    assert not _rank_0_waits([waits, before], [waits, before._replace(num_beats=6)]), "it is idle"
    computes = waits._replace(num_marks=8)
    assert not _rank_0_waits([computes, before], [computes, before._replace(num_marks=10)])


def test_rank_0_reads_what_a_follower_counts_even_inside_an_exchange() -> None:
    ours, theirs = Pipe()
    followers, pipe = Followers([leader_pipe(ours)], lambda: None), follower_pipe(theirs)
    pipe.send(Joined("here"))
    followers.await_joined()
    pulse = RankPulses(2).of(1)
    with reporting_pulse(pulse, pipe, on_lost=lambda: None):
        pulse.beat()
        with pulse.exchanging():
            wait_for(lambda: followers.pulses.read()[1][:2] == (1, 1))
            before = followers.pulses.read()[1].num_lives
            wait_for(lambda: followers.pulses.read()[1].num_lives > before + 1)
    followers.close()


def test_a_follower_notices_that_rank_0_is_gone_while_it_waits_for_another_rank() -> None:
    ours, theirs = Pipe()
    lost = Event()
    with reporting_pulse(RankPulses(2).of(1), follower_pipe(theirs), on_lost=lost.set):
        ours.close()
        assert lost.wait(60)
