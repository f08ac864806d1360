"""When drafts are tried that are not expected to pay, and what a track learns from them."""

from __future__ import annotations

import pytest

from loraplex.engine.speculation.probes import LONGEST, SHARE, SHORTEST, ProbeBudget, ProbeTimes
from loraplex.engine.speculation.track import Track


def test_probes_become_ever_rarer_until_one_succeeds() -> None:
    times = ProbeTimes()
    assert times.is_due(0)
    gaps: list[int] = []
    step = 0
    while len(gaps) < 8:
        times.begin(step)
        assert not times.is_due(times.next_step - 1)
        assert times.is_due(times.next_step)
        gaps.append(times.next_step - step)
        step = times.next_step
    assert gaps == [SHORTEST * 2**n for n in range(6)] + [LONGEST] * 2
    times.succeed()
    assert times.next_step == times.last_step + SHORTEST
    times.begin(times.next_step)
    assert times.next_step == times.last_step + SHORTEST


def test_probes_take_their_share_of_the_time_of_all_steps() -> None:
    budget = ProbeBudget()
    assert not budget.spend(1e-9, 10.0)
    budget.earn(10.0)
    assert budget.spend(SHARE * 10.0, 10.0)
    assert not budget.spend(1e-9, 10.0)
    budget.earn(10.0, num_steps=4)
    assert budget.spend(SHARE * 40.0, 10.0)


def test_the_time_of_two_steps_is_saved_at_most_and_pays_for_any_probe() -> None:
    budget = ProbeBudget()
    budget.earn(1.0, num_steps=1000)
    assert [budget.spend(price, 1.0) for price in (1.5, 0.6, 0.5)] == [True, False, True]
    budget.earn(1.0, num_steps=1000)
    assert [budget.spend(price, 1.0) for price in (50.0, 0.1)] == [True, False]


def test_the_savings_of_long_steps_outlast_a_short_one() -> None:
    budget = ProbeBudget()
    budget.earn(10.0, num_steps=1000)
    budget.earn(1.0)
    assert [budget.spend(20.0, 10.0), budget.spend(0.1, 10.0)] == [True, False]


def test_drafts_are_at_most_twice_as_long_as_the_longest_so_far() -> None:
    track = Track(8)
    assert len(track.gains(8)) == 2
    track.observe(1, 3, [0])
    track.observe(2, 2, [0])
    assert [len(track.gains(number)) for number in (8, 4)] == [6, 4]


def test_the_gains_of_a_draft_count_only_where_there_is_one() -> None:
    track = Track(2)
    for step in range(50):
        track.observe_request(step, has_draft=step % 2 == 0)
    rates = track.acceptance.probabilities
    assert track.gains(2) == [track.hit_rate.value * rate for rate in rates]
    assert track.hit_rate.value == pytest.approx(0.5, abs=0.15)


def test_a_probe_says_more_than_other_drafts_and_is_soon_repeated_if_a_token_was_right() -> None:
    probed, other = tracks = [Track(2), Track(2)]
    for track in tracks:
        for step in range(100):
            track.observe(step, 2, [])
    probed.probe_times.begin(100)
    for track in tracks:
        track.observe(100, 2, [0])
    assert probed.acceptance.probabilities[0] > 1.5 * other.acceptance.probabilities[0]
    assert probed.probe_times.next_step == 100 + SHORTEST
    probed.probe_times.begin(104)
    probed.probe_times.begin(108)
    probed.observe(108, 2, [])
    assert probed.probe_times.next_step == 108 + 2 * SHORTEST
    assert other.probe_times.next_step == 0


def test_a_track_counts_what_was_drafted_and_accepted() -> None:
    track = Track(4)
    track.planned = 3
    track.observe(1, 3, [0, 1])
    track.observe(1, 2, [])
    stats = track.stats(None, "p")
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 2)
    assert (stats.key, stats.proposer, stats.num_tokens) == (None, "p", 3)
    assert stats.acceptance == track.acceptance.probabilities[0]
