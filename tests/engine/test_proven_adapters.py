from __future__ import annotations

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.process import proven_adapters
from loraplex.engine.process.proven_adapters import PROOF_ANSWERS, PROOF_SECONDS, ProvenAdapters

KEY = AdapterKey("acme", "a")
OTHER = AdapterKey("acme", "b")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_many_answers_that_last_long_enough_are_a_proof() -> None:
    clock = Clock()
    proven = ProvenAdapters(clock)
    completed = []
    for number in range(1, 2 * PROOF_ANSWERS + 1):
        if number == PROOF_ANSWERS:
            clock.now += PROOF_SECONDS
        completed.append(proven.note_answer(KEY))
        assert (KEY in proven) is (number >= PROOF_ANSWERS)
    assert completed.index(True) == PROOF_ANSWERS - 1
    assert completed.count(True) == 1


def test_answers_to_requests_that_began_together_are_no_proof_until_the_long_ones_have_ended() -> (
    None
):
    clock = Clock()
    proven = ProvenAdapters(clock)
    assert not any(proven.note_answer(KEY) for _ in range(10 * PROOF_ANSWERS))
    clock.now += PROOF_SECONDS
    assert KEY not in proven
    assert proven.note_answer(KEY)


def test_who_is_disproved_begins_anew() -> None:
    proven = ProvenAdapters(Clock())
    proven.note_proven(KEY)
    proven.note_proven(OTHER)
    proven.disprove(KEY)
    assert list(proven) == [OTHER]
    assert not proven.note_answer(KEY)


def test_the_longest_idle_adapter_is_forgotten_first() -> None:
    proven = ProvenAdapters(Clock())
    keys = [AdapterKey("acme", str(number)) for number in range(3)]
    for key in keys:
        proven.note_proven(key)
    proven.note_answer(keys[0])
    limit = proven_adapters.MAX_ADAPTERS
    for number in range(limit - 2):
        proven.note_proven(AdapterKey("other", str(number)))
    assert keys[0] in proven
    assert keys[1] not in proven
    assert keys[2] in proven
