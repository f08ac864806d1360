"""Thousands of malformed adapters: each is refused with a code and a pointer, or harmless."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from loraplex.adapters.errors import AdapterRejected
from loraplex.adapters.examination import IntakeReport
from loraplex.adapters.formats import SERVED
from loraplex.adapters.intake import IntakeRequest
from support import malformed
from support.malformed import Examiner, examine_here, examine_in_child, run_malformed, valid_adapter
from support.malformed_features import run_malformed_features
from support.mutators import MUTATORS, mutated

NUM_MALFORMED = 160
"""`make adapter-evidence` takes 2,000."""


def test_there_are_enough_kinds_and_each_is_drawn_anew_but_repeatably() -> None:
    assert len(MUTATORS) >= 40
    valid = valid_adapter()
    drawn = [files for _, files in mutated(valid, 3 * len(MUTATORS))]
    assert drawn == [files for _, files in mutated(valid, 3 * len(MUTATORS))]
    assert len({(files.config, files.weights) for files in drawn}) > 2 * len(MUTATORS)


def test_malformed_adapters_are_refused_with_a_code_and_a_pointer_or_do_what_peft_says() -> None:
    outcome = run_malformed(NUM_MALFORMED)
    assert outcome.is_good, outcome
    assert outcome.tried == NUM_MALFORMED
    assert NUM_MALFORMED // 2 < outcome.refused < NUM_MALFORMED  # both kinds were among them
    assert len(outcome.codes) >= 25


@pytest.mark.slow
def test_one_of_every_other_kind_through_the_process_of_a_push() -> None:
    """`tests/api/test_malformed_uploads.py` pushes the other kinds."""
    others = slice(1, None, 2)
    outcome = run_malformed(len(MUTATORS), seed=1, examiner=examine_in_child, chosen=others)
    assert outcome.is_good, outcome
    assert outcome.tried == len(MUTATORS) // 2


def test_adapters_of_every_served_feature_neither_crash_nor_hang_intake() -> None:
    outcome = run_malformed_features(NUM_MALFORMED // len(SERVED))
    assert outcome.is_good, outcome
    assert outcome.refused > outcome.tried // 2


def _crash(_request: IntakeRequest) -> NoReturn:
    raise IndexError


def _hang(_request: IntakeRequest) -> IntakeReport:
    with malformed.cpu_limit(0.05):
        while True:
            pass


def _say_nothing_known(_request: IntakeRequest) -> NoReturn:
    raise AdapterRejected("because", "of this")


def _say_not_where(_request: IntakeRequest) -> NoReturn:
    raise AdapterRejected("shape_mismatch", "somewhere")


def _echo_control_characters(_request: IntakeRequest) -> NoReturn:
    raise AdapterRejected("no_effect", "\x1b[2J")


def _accept_all(request: IntakeRequest) -> IntakeReport:
    folder = Path(request.output_path).parent
    valid = valid_adapter()
    for name, content in (("config", valid.config), ("weights", valid.weights)):
        (folder / name).write_bytes(content)
    return examine_here(request)


def _refuse_all(_request: IntakeRequest) -> NoReturn:
    raise AdapterRejected("no_effect", "never")


@pytest.mark.parametrize(
    ("examiner", "counted_as"),
    [
        (_crash, "crashes"),
        (_hang, "hangs"),
        (_say_nothing_known, "uncoded"),
        (_say_not_where, "uncoded"),
        (_echo_control_characters, "uncoded"),
        (_accept_all, "misjudged"),
        (_refuse_all, "misjudged"),
        (_refuse_all, "good_refused"),
    ],
)
def test_an_intake_at_fault_would_be_noticed(examiner: Examiner, counted_as: str) -> None:
    kinds = len(MUTATORS) if counted_as == "misjudged" else 3
    try:
        outcome = run_malformed(kinds, examiner=examiner)
    except (IndexError, malformed.Hang):
        pytest.fail("a fault ended the series")
    assert not outcome.is_good
    assert getattr(outcome, counted_as)
