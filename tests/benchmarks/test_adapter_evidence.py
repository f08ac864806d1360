"""The evidence command: its counts, and that it fails if a bar is missed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.adapter_evidence import BARS, SECTIONS, Amount, main, missed_bars

from benchmarks import adapter_evidence
from loraplex.adapters.failpoints import FAILPOINTS

GOOD: dict[str, Any] = {
    "features": {"lora": {"outcome": "served", "is_right": True, "max_error": 1e-6}},
    "malformed": {
        **{"tried": 10, "refused": 8, "crashes": 0, "hangs": 0, "uncoded": 0},
        **{"misjudged": 0, "good_refused": 0},
    },
    "broken": {"tried": 20, "right_code": 20},
    "faulty_loads": {
        **{"tried": 5, "corrupt_served": 0, "corrupt_files": 0, "uncoded": 0},
        **{"objects": 2, "recovered": 2},
    },
    "canaries": {"requests": 5, "foreign": 0},
    "composed_canaries": {"requests": 5, "foreign": 0},
    "activated_canaries": {"requests": 5, "foreign": 0},
    "state_canaries": {"requests": 5, "foreign": 0},
    "kv_canaries": {"requests": 5, "foreign": 0, "tokens_from_host": 1},
    "crash_points": {"tried": 3, "lost": 0, "orphans": 0},
    "reserved_over_true": 1.05,
}
AMOUNT = Amount(
    seed=0,
    malformed=5,
    faulty_loads=5,
    canary_requests=5,
    composed_canary_requests=5,
    activated_canary_requests=5,
    state_canary_requests=5,
    kv_canary_requests=5,
)
BAD: list[tuple[str, Any]] = [
    ("features", {}),
    ("features", {"lora": {"outcome": "refused:no_effect", "is_right": False}}),
    ("malformed", {"tried": 9}),
    ("malformed", {"crashes": 1}),
    ("malformed", {"hangs": 1}),
    ("malformed", {"uncoded": 1}),
    ("malformed", {"misjudged": 1}),
    ("malformed", {"good_refused": 1}),
    ("broken", {"tried": 19, "right_code": 19}),
    ("broken", {"right_code": 19}),
    ("faulty_loads", {"tried": 4}),
    ("faulty_loads", {"corrupt_served": 1}),
    ("faulty_loads", {"corrupt_files": 1}),
    ("faulty_loads", {"uncoded": 1}),
    ("faulty_loads", {"recovered": 1}),
    ("canaries", {"requests": 4}),
    ("canaries", {"foreign": 1}),
    ("composed_canaries", {"requests": 4}),
    ("composed_canaries", {"foreign": 1}),
    ("activated_canaries", {"requests": 4}),
    ("activated_canaries", {"foreign": 1}),
    ("state_canaries", {"requests": 4}),
    ("state_canaries", {"foreign": 1}),
    ("kv_canaries", {"requests": 4}),
    ("kv_canaries", {"foreign": 1}),
    ("kv_canaries", {"tokens_from_host": 0}),
    ("crash_points", {"tried": 0}),
    ("crash_points", {"lost": 1}),
    ("crash_points", {"orphans": 1}),
    ("reserved_over_true", 1.11),
    ("reserved_over_true", 0.9),  # less than what is held cannot be right
]


def test_every_section_has_a_bar_and_good_figures_pass() -> None:
    assert SECTIONS.keys() == BARS.keys() == GOOD.keys()
    assert missed_bars(GOOD, AMOUNT) == []


@pytest.mark.parametrize(("section", "change"), BAD)
def test_a_figure_below_its_bar_is_a_miss(section: str, change: Any) -> None:
    is_merged = isinstance(change, dict) and section != "features"
    found = {**GOOD[section], **change} if is_merged else change
    assert missed_bars({**GOOD, section: found}, AMOUNT) == [section]


def test_chosen_sections_are_printed_as_json_and_decide_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only(ratio: float) -> None:
        monkeypatch.setattr(
            adapter_evidence, "SECTIONS", {"reserved_over_true": lambda _amount: ratio}
        )

    only(1.02)
    assert main(["--only", "reserved_over_true"]) == 0
    assert json.loads(capsys.readouterr().out) == {"reserved_over_true": 1.02}
    only(1.5)
    assert main(["--only", "reserved_over_true"]) == 1
    assert "bar missed: reserved_over_true" in capsys.readouterr().err


def test_malformed_adapters_are_counted_over_all_workers() -> None:
    found = adapter_evidence.malformed(AMOUNT)
    assert found["tried"] >= 2 * AMOUNT.malformed
    assert found["crashes"] == found["uncoded"] == 0
    assert missed_bars({"malformed": found}, AMOUNT) == []


def test_a_quick_run_tries_a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    amounts: list[Amount] = []

    def note(amount: Amount) -> float:
        amounts.append(amount)
        return 1.0

    monkeypatch.setattr(adapter_evidence, "SECTIONS", {"reserved_over_true": note})
    for size in (["--quick"], [], ["--soak"]):
        assert main(size) == 0
    quick, whole, soak = (amount.canary_requests for amount in amounts)
    assert 5 * quick == whole < soak
    quick, whole, soak = (len(amount.crash_points) for amount in amounts)
    assert 0 < quick <= whole / 4
    assert whole == soak == len(FAILPOINTS)
