"""`loraplex drafts layers`: from a file of texts to the layers that drafts leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.api import cli
from loraplex.api.cli.draft_layers import Choice
from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.cli.speculation import parse_speculation
from loraplex.api.demo.manifest import WEIGHTS
from loraplex.engine.speculation import draft_costs, draft_trial
from loraplex.engine.speculation.layer_choice import Forecast
from support.medusa import write_demo_texts

BASE = WEIGHTS / "base"
FEW = ("--prefixes", "16", "--max-draft-tokens", "2", "--device", "cpu")


def choose(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["loraplex", "drafts", "layers", *arguments])
    try:
        return cli.main()
    except SystemExit as exc:
        return int(exc.code or 0)


def set_costs(
    monkeypatch: pytest.MonkeyPatch, *, outside: float, verification: float, acceptance: float
) -> None:
    """Fix what depends on the machine and the base: passes, and the share of right drafts."""
    costs = draft_costs.DraftCosts(outside, [verification] * 2, 4)
    monkeypatch.setattr(draft_costs, "measure_costs", lambda *_: costs)
    own = draft_trial.DraftTrial.accepted
    monkeypatch.setattr(
        draft_trial.DraftTrial,
        "accepted",
        lambda trial, part: [acceptance * share for share in own(trial, part)],
    )


def test_prints_a_table_and_an_option_that_a_server_accepts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts, results = write_demo_texts(tmp_path / "texts.jsonl", 20), tmp_path / "results.json"
    set_costs(monkeypatch, outside=0.1, verification=1.1, acceptance=1.0)
    options = ("--texts", str(texts), "--json", str(results), *FEW)
    assert choose(monkeypatch, str(BASE), *options) == ExitCode.OK
    header, *lines, verdict = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "left out"
    found: dict[str, Any] = json.loads(results.read_text())
    (entry,) = parse_speculation([found["option"]])
    assert verdict.endswith(f"Serve with: --speculation {entry}")
    sizes = [len(each["best"]["left_out"]) for each in found["sizes"]]
    assert sizes == [1, 2, 3] == list(range(1, len(lines) + 1))
    assert [len(each["early_exit"]["left_out"]) for each in found["sizes"]] == sizes
    assert found["num_prefixes"] >= 8
    best = max(found["sizes"], key=lambda each: each["best"]["predicted"])["best"]
    assert f"Predicted {best['predicted']:.2f} times" in verdict


def test_says_so_if_no_set_pays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts, results = write_demo_texts(tmp_path / "texts.jsonl", 20), tmp_path / "results.json"
    set_costs(monkeypatch, outside=0.1, verification=1.1, acceptance=0.1)
    options = ("--texts", str(texts), "--json", str(results), *FEW)
    assert choose(monkeypatch, str(BASE), *options) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "No set of layers pays on these texts" in printed
    assert "--speculation" not in printed
    assert json.loads(results.read_text())["option"] is None


@pytest.mark.parametrize(
    ("left_out", "ratio", "option"),
    [
        ({1, 2}, 1.2, "skip:1-2"),
        ({0, 3}, 1.2, "skip:0,3"),
        ({2, 3}, 1.2, "early_exit:2"),
        ({1, 2}, 1.0, None),
    ],
)
def test_the_last_layers_are_left_out_by_early_exit(
    left_out: set[int], ratio: float, option: str | None
) -> None:
    best = Forecast(frozenset(left_out), [0.5], 1, ratio)
    costs = draft_costs.DraftCosts(0.1, [1.1], 4)
    assert Choice(costs, [], best, 8).option == option


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (['{"text": "one text alone, and no other"}'], "give two or more"),
        (["no JSON"], "texts: line 1"),
        (['{"text": ""}'], "has no text of 4 tokens or more"),
    ],
)
def test_texts_that_cannot_be_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lines: list[str],
    complaint: str,
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(lines))
    assert choose(monkeypatch, str(BASE), "--texts", str(texts), *FEW) != ExitCode.OK
    assert complaint in capsys.readouterr().err
