"""`loraplex eval --golden-set`: an evaluation that the server runs."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ..client.api_client import ApiClient, api_path
from ..client.references import Reference, find_number
from ..evaluation.golden_set import Scorer
from ..evaluation.report import CaseReport, Models, Report, SliceReport
from .evaluation_watch import follow_evaluation
from .exit_codes import CommandFailed, ExitCode

ROLES = ("candidate", "against", "base")


def evaluate_on_server(
    client: ApiClient,
    candidate: Reference,
    against: Reference | None,
    golden_set: str,
    *,
    is_quiet: bool,
) -> dict[str, Any]:
    """The evaluation with its report. Raises CommandFailed."""
    body: dict[str, Any] = {
        "version": find_number(client, candidate),
        "golden_set": golden_set,
    }
    if against is not None:
        if against.name != candidate.name:
            message = "The server compares versions of one adapter: --against names another."
            raise CommandFailed(message, ExitCode.USAGE)
        body["against"] = find_number(client, against)
    path = api_path("adapters", candidate.name, "evaluations")
    started = client.post(path, body, idempotency_key=uuid.uuid4().hex)
    return follow_evaluation(client, candidate.name, started["id"], is_quiet=is_quiet)


def report_of(evaluation: dict[str, Any]) -> Report:
    """The report in an evaluation, with the cases that the server keeps."""
    name, number = evaluation["adapter"], evaluation["against"]
    models = Models(
        f"{name}@{evaluation['version']}",
        evaluation["base"] if number is None else f"{name}@{number}",
        evaluation["base"],
    )
    return Report(
        evaluation["sha256"],
        models,
        evaluation["tolerance"],
        evaluation["is_regression"],
        msgspec.convert(evaluation["slices"], list[SliceReport]),
        [_case(models, case) for case in evaluation["cases"]],
    )


def _case(models: Models, case: dict[str, Any]) -> CaseReport:
    named = zip((models.candidate, models.against, models.base), ROLES, strict=True)
    answers = {model: case[role] for model, role in named}
    return CaseReport(
        case["id"],
        Scorer(case["scorer"]),
        case["slices"],
        {model: answer["answer"] for model, answer in answers.items()},
        {model: answer["score"] for model, answer in answers.items()},
    )
