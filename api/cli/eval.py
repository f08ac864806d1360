"""`loraplex eval`: compares a version of an adapter with another one on a golden set."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..client.api_client import ApiClient
from ..client.references import Reference, find_number, parse_reference
from ..evaluation.golden_set import GoldenSet, Scorer
from ..evaluation.intervals import Interval
from ..evaluation.report import Models, Report
from ..evaluation.scoring import get_answers, get_scores
from .batch_answers import BatchAnswers
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import AsJson, note, print_json, print_rows
from .references import Version
from .server_evaluation import evaluate_on_server, report_of

app = typer.Typer(add_completion=False)

NUM_SHOWN = 20
"""Cases on the terminal; the report has all."""


@app.command()
def evaluate(
    candidate: Version,
    file: Annotated[
        Path | None,
        typer.Option(
            "--set", help="One case per line.", exists=True, dir_okay=False, readable=True
        ),
    ] = None,
    golden_set: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Golden set of the adapter: the server evaluates."),
    ] = None,
    against: Annotated[
        Any,
        typer.Option(
            parser=parse_reference,
            metavar="NAME[@VERSION]",
            help="Version to compare with.",
            show_default="the one that requests get, or the base if that is the candidate",
        ),
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Model that judges cases with the scorer judge.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            callback=check_finite,
            help="Loss of mean score that is no regression.",
            show_default="0",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder.", show_default="SET.eval/NAME@VERSION"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Ask again, also if the folder has the answers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare a version of an adapter with another one and the base on a golden set.

    The cases are those of a file, or of a golden set on the server. The requests run as batches, in
    idle capacity. Exits with 1 if the mean score of a slice falls by more than the tolerance. After
    an interruption, the same command continues with a file; with a golden set, the server does.
    """
    if (file is None) == (golden_set is None):
        raise CommandFailed("Use either --set FILE or --golden-set NAME.", ExitCode.USAGE)
    if file is not None:
        report, place = _evaluate_file(
            file, candidate, against, judge, tolerance or 0.0, output, force=force, as_json=as_json
        )
    elif golden_set is not None:
        if force or any(given is not None for given in (judge, tolerance, output)):
            message = "--judge, --tolerance, --output and --force belong to --set."
            raise CommandFailed(message, ExitCode.USAGE)
        with open_client() as client:
            evaluation = evaluate_on_server(
                client, candidate, against, golden_set, is_quiet=as_json
            )
        report, place = report_of(evaluation), f"evaluation {evaluation['id']}"
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print_report(report, place)
    if report.is_regression:
        worse = ", ".join(each.slice for each in report.slices if each.is_regression)
        models = report.models
        raise CommandFailed(f"{models.candidate} is worse than {models.against}: {worse}")


def _evaluate_file(
    file: Path,
    candidate: Reference,
    against: Reference | None,
    judge: str | None,
    tolerance: float,
    output: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> tuple[Report, str]:
    """The report over the cases of a file, and where it was written."""
    cases = GoldenSet.read(file)
    if Scorer.JUDGE in cases.scorers and judge is None:
        raise CommandFailed("Cases with the scorer judge need --judge MODEL.", ExitCode.USAGE)
    with open_client() as client:
        models = _find_models(client, candidate, against)
        folder = output or file.with_name(f"{file.stem}.eval") / models.candidate
        _prepare(folder, force=force)
        ask = BatchAnswers(client, folder, is_quiet=as_json).ask
        answers = get_answers(cases, models, ask)
        scores = get_scores(cases, models, answers, ask, judge=judge)
    report = Report.of(
        cases,
        models,
        answers,
        scores,
        tolerance=tolerance,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    report.write(folder / "report.json")
    return report, str(folder / "report.json")


def _find_models(client: ApiClient, candidate: Reference, against: Reference | None) -> Models:
    """The versions by number, so that a moved alias changes nothing while the evaluation runs."""
    base: str = client.get("/base")["id"]
    evaluated = _numbered(client, candidate)
    other = _numbered(client, against or Reference(candidate.name, None))
    if other == evaluated:
        other = base
    return Models(evaluated, other, base)


def _numbered(client: ApiClient, reference: Reference) -> str:
    return f"{reference.name}@{find_number(client, reference)}"


def _prepare(folder: Path, *, force: bool) -> None:
    """Make the folder; with `force`, without what an earlier evaluation asked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if force:
            for file in folder.glob("*.jsonl*"):
                file.unlink()
    except OSError as exc:
        raise CommandFailed(f"{exc.filename or folder}: {exc.strerror}") from exc


def _print_report(report: Report, place: str) -> None:
    models = report.models
    columns = ["slice", "cases", *reversed(models.names), "difference", "regression"]
    print_rows(
        [
            {
                "slice": each.slice,
                "cases": each.num_cases,
                models.base: _shown(each.base),
                models.against: _shown(each.against),
                models.candidate: _shown(each.candidate),
                "difference": _shown(each.difference, sign="+"),
                "regression": "yes" if each.is_regression else "no",
            }
            for each in report.slices
        ],
        columns,
    )
    if worse := report.worse_cases:
        typer.echo()
        print_rows(
            [
                {
                    "case": each.id,
                    "scorer": each.scorer,
                    models.against: f"{each.scores[models.against]:.3f}",
                    models.candidate: f"{each.scores[models.candidate]:.3f}",
                }
                for each in worse[:NUM_SHOWN]
            ],
            ["case", "scorer", models.against, models.candidate],
        )
    note(f"{len(worse)} cases are worse. The report with the answers: {place}")


def _shown(interval: Interval, sign: str = "") -> str:
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"
