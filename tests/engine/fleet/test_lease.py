from __future__ import annotations

from loraplex.engine.fleet.lease import MAX_OPEN_QUESTIONS, Lease


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_counts_from_its_question() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert not lease.is_held
    assert not lease.is_lost, "what never was held cannot be lost"
    number = lease.ask()
    clock.now += 50
    lease.renew(number, 60.0)
    assert lease.is_held
    clock.now += 10
    assert lease.is_lost


def test_an_old_answer_does_not_shorten_a_lease() -> None:
    clock = Clock()
    lease = Lease(clock)
    early = lease.ask()
    clock.now += 5
    late = lease.ask()
    lease.renew(late, 60.0)
    lease.renew(early, 60.0)
    clock.now += 59
    assert lease.is_held


def test_a_lost_lease_stays_lost() -> None:
    clock = Clock()
    lease = Lease(clock)
    lease.renew(lease.ask(), 60.0)
    clock.now += 60
    lease.renew(lease.ask(), 60.0)
    assert lease.is_lost


def test_answers_to_unknown_questions_are_ignored() -> None:
    lease = Lease(Clock())
    for number in (-1, 0, 7):
        lease.renew(number, 60.0)
    assert not lease.is_held
    first = lease.ask()
    for _ in range(MAX_OPEN_QUESTIONS):
        lease.ask()
    lease.renew(first, 60.0)
    assert not lease.is_held
