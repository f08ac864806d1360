from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.adapters.identity import AdapterKey
from loraplex.engine.errors import EngineError
from loraplex.engine.messages import ErrorInfo, FinishReason, GenerationRequest, RequestFinished
from loraplex.engine.process.proven_adapters import PROOF_ANSWERS, PROOF_SECONDS
from loraplex.engine.process.quarantine import (
    ALL_STEPS,
    FIRST_LONE_STEPS,
    MAX_TENANT_CRASHES,
    QUARANTINE_SECONDS,
    Quarantine,
    crash_of,
    fingerprint,
)
from loraplex.engine.sampling_params import SamplingParams

ADAPTER = AdapterKey("acme", "a")
INNOCENT = AdapterKey("innocent", "a")
NAN = ErrorInfo("numerical_error", "not finite")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quarantine(clock: Clock) -> Quarantine:
    return Quarantine(clock)


def make(prompt: int = 1, adapter: AdapterKey | None = None, *, seed: int = 0) -> GenerationRequest:
    sampling = SamplingParams(seed=seed)
    return GenerationRequest(f"r-{prompt}-{seed}", "acme", [prompt], sampling, adapter)


def end(
    reason: FinishReason = FinishReason.STOP, error: ErrorInfo | None = None
) -> RequestFinished:
    return RequestFinished("r", FinishReason.ERROR if error else reason, 1, 1, error)


def answer(quarantine: Quarantine, request: GenerationRequest, number: int) -> None:
    for _ in range(number):
        quarantine.note_end(request, end())


def code(error: EngineError | None) -> str | None:
    return None if error is None else error.code


def test_a_request_in_two_crashes_is_kept_out_under_any_id(quarantine: Quarantine) -> None:
    quarantine.note_crash(crash_of([make(seed=1), make(seed=2)], is_alone=False))
    assert quarantine.objection(make()) is None, "one crash is one, however many choices it had"
    quarantine.note_crash(crash_of([make(seed=3)], is_alone=True))
    assert code(quarantine.objection(make(seed=4))) == "request_quarantined"
    assert quarantine.objection(make(prompt=2)) is None


def test_an_adapter_in_two_crashes_is_kept_out_whatever_is_asked(quarantine: Quarantine) -> None:
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=True))
    quarantine.note_crash(crash_of([make(2, ADAPTER)], is_alone=True))
    assert code(quarantine.objection(make(3, ADAPTER))) == "adapter_quarantined"
    assert quarantine.objection(make(1)) is None, "the base model is nobody's"
    assert quarantine.objection(make(1, AdapterKey("other", "a"))) is None
    assert quarantine.holds(ADAPTER)


def test_who_was_only_there_is_kept_out_by_no_number_of_crashes(quarantine: Quarantine) -> None:
    innocent, poison = make(1, AdapterKey("innocent", "a")), make(2, ADAPTER)
    quarantine.note_crash(crash_of([innocent, poison], is_alone=False))
    quarantine.note_crash(crash_of([innocent, poison], is_alone=False))
    assert quarantine.objection(innocent) is None
    assert quarantine.objection(poison) is None
    quarantine.note_crash(crash_of([poison], is_alone=True))
    assert code(quarantine.objection(poison)) == "adapter_quarantined"
    assert quarantine.objection(innocent) is None


def test_a_suspect_runs_alone_until_it_is_cleared(quarantine: Quarantine) -> None:
    suspect, other = make(1, ADAPTER), replace(make(1), tenant_id="other")
    quarantine.note_proven(ADAPTER)
    assert quarantine.num_lone_steps(suspect) == 0
    quarantine.note_crash(crash_of([suspect], is_alone=False))
    assert quarantine.num_lone_steps(make(2, ADAPTER)) == FIRST_LONE_STEPS
    quarantine.note_crash(crash_of([suspect], is_alone=False))
    assert quarantine.num_lone_steps(make(2, ADAPTER)) == ALL_STEPS
    assert quarantine.num_lone_steps(other) == 0
    quarantine.note_end(make(2, ADAPTER), end())
    assert quarantine.num_lone_steps(make(2, ADAPTER)) == 0
    assert quarantine.num_lone_steps(suspect) == ALL_STEPS, "this very request has not answered"
    quarantine.note_end(suspect, end())
    assert quarantine.num_lone_steps(suspect) == 0


def test_an_unproven_suspect_runs_alone_throughout_until_it_is_proven(
    quarantine: Quarantine, clock: Clock
) -> None:
    quarantine.note_crash(crash_of([make(1, ADAPTER), make(2, INNOCENT)], is_alone=False))
    answer(quarantine, make(3, ADAPTER), PROOF_ANSWERS - 1)
    assert quarantine.num_lone_steps(make(4, ADAPTER)) == ALL_STEPS
    clock.now += PROOF_SECONDS
    answer(quarantine, make(3, ADAPTER), 1)
    assert quarantine.num_lone_steps(make(4, ADAPTER)) == 0
    assert quarantine.num_lone_steps(make(5, INNOCENT)) == ALL_STEPS


def test_answers_before_a_crash_are_no_proof_unless_there_were_enough(
    quarantine: Quarantine, clock: Clock
) -> None:
    answer(quarantine, make(1, ADAPTER), PROOF_ANSWERS - 1)
    answer(quarantine, make(1, INNOCENT), PROOF_ANSWERS - 1)
    clock.now += PROOF_SECONDS
    answer(quarantine, make(1, INNOCENT), 1)
    quarantine.note_crash(crash_of([make(1, ADAPTER), make(2, INNOCENT)], is_alone=False))
    for key in (ADAPTER, INNOCENT):
        answer(quarantine, make(3, key), 1)
    assert quarantine.num_lone_steps(make(4, ADAPTER)) == ALL_STEPS
    assert quarantine.num_lone_steps(make(4, INNOCENT)) == 0


def test_answers_elsewhere_prove_an_adapter_and_clear_it_but_end_no_quarantine(
    quarantine: Quarantine,
) -> None:
    assert not quarantine.is_proven(ADAPTER)
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=False))
    quarantine.note_proven(ADAPTER)
    assert quarantine.is_proven(ADAPTER)
    assert quarantine.num_lone_steps(make(2, ADAPTER)) == FIRST_LONE_STEPS, "for its tenant's sake"
    for _ in range(2):
        quarantine.note_crash(crash_of([make(3, ADAPTER)], is_alone=True))
    quarantine.note_proven(ADAPTER)
    assert quarantine.holds(ADAPTER)
    assert not quarantine.is_proven(ADAPTER), "after ten minutes it has to prove itself again"


def test_the_owner_is_told_once_when_answers_have_become_a_proof(clock: Clock) -> None:
    proven: list[AdapterKey] = []
    quarantine = Quarantine(clock, proven.append)
    for _ in range(3):
        answer(quarantine, make(1, ADAPTER), PROOF_ANSWERS)
        clock.now += PROOF_SECONDS
    assert proven == [ADAPTER]


def test_a_crash_alone_makes_no_culprit_of_who_is_beside_others_in_the_next_one(
    quarantine: Quarantine,
) -> None:
    quarantine.note_crash(crash_of([make(1, INNOCENT)], is_alone=True))
    quarantine.note_crash(crash_of([make(1, INNOCENT), make(1, ADAPTER)], is_alone=False))
    assert not quarantine.holds(INNOCENT)


def test_crashes_may_be_told_in_any_order(quarantine: Quarantine) -> None:
    first = crash_of([make(1, INNOCENT), make(1, ADAPTER)], is_alone=False)
    second = crash_of([make(2, ADAPTER)], is_alone=True)
    quarantine.note_crash(replace(second, seconds_ago=10.0))
    quarantine.note_crash(replace(first, seconds_ago=20.0))
    assert quarantine.holds(ADAPTER)
    assert not quarantine.holds(INNOCENT)


def test_a_crash_that_is_told_late_counts_from_when_it_was(
    quarantine: Quarantine, clock: Clock
) -> None:
    for _ in range(2):
        crash = crash_of([make(1, ADAPTER)], is_alone=True)
        quarantine.note_crash(replace(crash, seconds_ago=QUARANTINE_SECONDS - 5))
    assert quarantine.holds(ADAPTER)
    clock.now += 5
    assert not quarantine.holds(ADAPTER)


def test_a_request_is_no_culprit_of_a_pass_of_several_requests(quarantine: Quarantine) -> None:
    for _ in range(2):
        quarantine.note_crash(crash_of([make(1, ADAPTER), make(2, ADAPTER)], is_alone=True))
    assert quarantine.holds(ADAPTER)
    assert not quarantine.holds(fingerprint(make(1, ADAPTER)))


def test_a_tenant_cannot_end_the_engine_again_and_again_by_requests_that_differ(
    quarantine: Quarantine, clock: Clock
) -> None:
    quarantine.note_crash(crash_of([make(0)], is_alone=False))
    for number in range(1, MAX_TENANT_CRASHES + 1):
        assert quarantine.num_lone_steps(make(number)) == FIRST_LONE_STEPS, "the next one is alone"
        assert quarantine.objection(make(number)) is None
        quarantine.note_crash(crash_of([make(number)], is_alone=True))
        quarantine.note_end(make(100), end())
        quarantine.note_crash(crash_of([make(200)], is_alone=False))
    refusal = quarantine.objection(make(300, ADAPTER))
    assert code(refusal) == "request_quarantined"
    assert "tenant" in str(refusal)
    assert quarantine.objection(replace(make(300), tenant_id="other")) is None
    clock.now += QUARANTINE_SECONDS
    assert quarantine.objection(make(300)) is None
    assert quarantine.num_lone_steps(make(300)) == 0


def test_a_good_answer_between_clears_whoever_was_only_there(quarantine: Quarantine) -> None:
    for _ in range(5):
        quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=False))
        quarantine.note_end(make(1, ADAPTER), end())
    assert quarantine.objection(make(1, ADAPTER)) is None


def test_a_good_answer_of_one_tenant_clears_no_other(quarantine: Quarantine) -> None:
    innocent = replace(make(1), tenant_id="innocent")
    quarantine.note_crash(crash_of([innocent, make(2)], is_alone=False))
    quarantine.note_end(innocent, end())
    assert quarantine.num_lone_steps(replace(make(3), tenant_id="innocent")) == 0
    assert quarantine.num_lone_steps(make(3)) == FIRST_LONE_STEPS


def test_an_abort_or_an_error_clears_nobody(quarantine: Quarantine) -> None:
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=True))
    quarantine.note_end(make(1, ADAPTER), end(FinishReason.ABORTED))
    quarantine.note_end(make(1, ADAPTER), end(error=ErrorInfo("engine_error", "")))
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=True))
    assert code(quarantine.objection(make(1, ADAPTER))) == "adapter_quarantined"


def test_numbers_that_break_down_three_times_in_a_row_keep_the_adapter_out(
    quarantine: Quarantine,
) -> None:
    for _ in range(2):
        quarantine.note_end(make(1, ADAPTER), end(error=NAN))
        quarantine.note_end(make(1, ADAPTER), end(error=NAN))
        quarantine.note_end(make(2, ADAPTER), end(FinishReason.LENGTH))
    assert quarantine.objection(make(1, ADAPTER)) is None
    for _ in range(3):
        quarantine.note_end(make(1, ADAPTER), end(error=NAN))
    assert code(quarantine.objection(make(2, ADAPTER))) == "adapter_quarantined"
    for _ in range(9):
        quarantine.note_end(make(1), end(error=NAN))
    assert quarantine.objection(make(1)) is None, "the base model is not kept out"


def test_a_quarantine_ends_by_time_alone(quarantine: Quarantine, clock: Clock) -> None:
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=True))
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=True))
    quarantine.note_end(make(1, ADAPTER), end())
    clock.now += QUARANTINE_SECONDS - 1
    quarantine.note_crash(crash_of([make(1, ADAPTER)], is_alone=True))
    assert quarantine.holds(ADAPTER)
    clock.now += 1
    assert quarantine.objection(make(1, ADAPTER)) is None


def test_crashes_long_apart_are_a_coincidence(quarantine: Quarantine, clock: Clock) -> None:
    for _ in range(4):
        quarantine.note_crash(crash_of([make()], is_alone=True))
        clock.now += QUARANTINE_SECONDS
    assert quarantine.objection(make()) is None


def test_only_the_id_and_the_seed_do_not_tell_requests_apart() -> None:
    request = make(1, ADAPTER)
    same = replace(request, request_id="other", sampling=SamplingParams(seed=9))
    assert fingerprint(same) == fingerprint(request)
    others = [
        replace(request, tenant_id="other"),
        replace(request, adapter=None),
        replace(request, prompt_token_ids=[1, 1]),
        replace(request, sampling=SamplingParams(max_tokens=3)),
    ]
    assert len({fingerprint(other) for other in [request, *others]}) == 5
