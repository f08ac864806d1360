"""Golden sets of tenants are checked and scored in a process with limits."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.api.evaluation.report import Models
from loraplex.api.evaluations.scoring_child import outcome_of
from loraplex.api.evaluations.scoring_process import Scoring, ScoringFailed
from loraplex.api.evaluations.scoring_task import Asks, Invalid, Scored, ScoringTask, Valid
from support.waiting import wait_for

MODELS = Models("bot@2", "bot@1", "tiny")


def write_set(folder: Path, *cases: dict[str, Any]) -> Path:
    path = folder / "golden.jsonl"
    path.write_text("".join(f"{json.dumps(case)}\n" for case in cases))
    return path


def write_answers(folder: Path, lines: Path, texts: dict[str, str]) -> Path:
    """Each model answers every prompt alike."""
    path = folder / "answers.jsonl"
    with path.open("w") as file:
        for line in map(json.loads, lines.read_text().splitlines()):
            body = {"choices": [{"text": texts[line["body"]["model"]]}]}
            result = {"custom_id": line["custom_id"], "response": {"body": body}}
            file.write(f"{json.dumps(result)}\n")
    return path


def doubling_schema() -> dict[str, Any]:
    """Takes 2**63 checks."""
    parts: dict[str, Any] = {"a0": {}}
    for at in range(1, 64):
        parts[f"a{at}"] = {"allOf": [{"$ref": f"#/$defs/a{at - 1}"}] * 2}
    return {"$defs": parts, "$ref": "#/$defs/a63"}


def test_a_set_is_checked_asked_and_scored(tmp_path: Path) -> None:
    case = {"id": "a", "prompt": "p", "pattern": "^y", "slices": ["s"]}
    golden_set = write_set(tmp_path, case, {**case, "id": "b", "slices": []})
    lines = tmp_path / "lines.jsonl"
    task = ScoringTask(golden_set=str(golden_set), file_id="file-1", lines=str(lines))
    scoring = Scoring()
    assert scoring.run(task) == Valid(2, has_judge=False)
    asking = msgspec.structs.replace(task, models=MODELS)
    assert scoring.run(asking) == Asks("answers", "/v1/completions")
    answers = write_answers(tmp_path, lines, {"bot@2": "yes", "bot@1": "no", "tiny": "no"})
    scored = scoring.run(msgspec.structs.replace(asking, answers={"answers": str(answers)}))
    assert isinstance(scored, Scored)
    assert not scored.is_regression
    assert [(each.slice, each.difference.mean) for each in scored.slices] == [("all", 1), ("s", 1)]
    assert [case.id for case in scored.cases] == ["a", "b"]
    assert scored.cases[0].expected == "^y"


def test_the_largest_losses_come_first_and_long_texts_are_cut(tmp_path: Path) -> None:
    cases = [{"id": f"same-{at}", "prompt": "p", "expected": "no"} for at in range(120)]
    cases.append({"id": "gain", "prompt": "p" * 3000, "expected": "yes"})
    cases.append({"id": "loss", "prompt": "p", "expected": "neither", "scorer": "rouge_l"})
    golden_set = write_set(tmp_path, *cases)
    lines = tmp_path / "lines.jsonl"
    task = ScoringTask(
        golden_set=str(golden_set), file_id="file-1", lines=str(lines), models=MODELS
    )
    assert isinstance(outcome_of(task), Asks)
    texts = {"bot@2": "yes", "bot@1": "no", "tiny": "neither"}
    answers = write_answers(tmp_path, lines, texts)
    scored = outcome_of(msgspec.structs.replace(task, answers={"answers": str(answers)}))
    assert isinstance(scored, Scored)
    assert scored.is_regression
    assert len(scored.cases) == 100
    assert {case.id.split("-")[0] for case in scored.cases} == {"same"}, "those of the losses"
    assert scored.slices[0].num_cases == 122
    texts["bot@1"] = "yes"
    write_answers(tmp_path, lines, {**texts, "bot@2": "yes", "bot@1": "x"})
    scored = outcome_of(msgspec.structs.replace(task, answers={"answers": str(answers)}))
    assert isinstance(scored, Scored)
    assert scored.cases[0].id == "gain"
    assert len(scored.cases[0].prompt) == 2001


@pytest.mark.slow  # its process has the lowest priority
def test_a_schema_of_exponential_cost_ends_its_process_alone(tmp_path: Path) -> None:
    golden_set = write_set(tmp_path, {"id": "a", "prompt": "p", "schema": doubling_schema()})
    lines = tmp_path / "lines.jsonl"
    task = ScoringTask(
        golden_set=str(golden_set),
        file_id="file-1",
        lines=str(lines),
        models=MODELS,
        cpu_seconds=2,
    )
    scoring = Scoring()
    assert isinstance(scoring.run(task), Asks)
    answers = write_answers(tmp_path, lines, dict.fromkeys(MODELS.names, "1"))
    with pytest.raises(ScoringFailed, match="processor time"):
        scoring.run(msgspec.structs.replace(task, answers={"answers": str(answers)}))


def test_closing_ends_a_process_that_still_runs(tmp_path: Path) -> None:
    golden_set = write_set(tmp_path, {"id": "a", "prompt": "p", "schema": doubling_schema()})
    lines = tmp_path / "lines.jsonl"
    task = ScoringTask(
        golden_set=str(golden_set), file_id="file-1", lines=str(lines), models=MODELS
    )
    outcome_of(task)
    answers = write_answers(tmp_path, lines, dict.fromkeys(MODELS.names, "1"))
    endless = msgspec.structs.replace(task, answers={"answers": str(answers)})
    scoring = Scoring()
    failures: list[ScoringFailed] = []

    def run() -> None:
        try:
            scoring.run(endless)
        except ScoringFailed as exc:
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def killed() -> bool:
        scoring.kill()
        thread.join(0.1)
        return not thread.is_alive()

    wait_for(killed)
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("cases", "problem"),
    [
        ([{"id": "a"}], "file-1, line 1: a case has either messages or prompt"),
        ([{"id": "a" * 201, "prompt": "p", "expected": "e"}], "a name of more than 200"),
        (
            [
                {"id": str(at), "prompt": "p", "expected": "e", "slices": [str(at)]}
                for at in range(50)
            ],
            "more than 50 slices",
        ),
        ([{"id": "a", "prompt": "p", "pattern": "(?=x)"}], "line 1: invalid pattern"),
    ],
)
def test_what_is_no_golden_set_is_invalid(
    tmp_path: Path, cases: list[dict[str, Any]], problem: str
) -> None:
    task = ScoringTask(golden_set=str(write_set(tmp_path, *cases)), file_id="file-1")
    outcome = outcome_of(task)
    assert isinstance(outcome, Invalid)
    assert problem in outcome.problem
    assert str(tmp_path) not in outcome.problem
