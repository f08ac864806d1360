"""Changes an alias that may have a gate: waits for the evaluation, and repeats the change."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import typer

from ..client.api_client import ApiClient, api_path
from ..client.errors import ApiRefused
from .evaluation_watch import ENDED, follow_evaluation

Override = Annotated[
    str | None,
    typer.Option(
        metavar="REASON", help="Change it although its gate is not passed; the history says why."
    ),
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Do not wait for the evaluation that a gate requires.")
]


def change_alias(
    client: ApiClient, name: str, alias: str, body: dict[str, Any], *, waits: bool, is_quiet: bool
) -> dict[str, Any]:
    """The alias after the change. Raises ApiRefused and CommandFailed."""
    path = api_path("adapters", name, "aliases", alias)
    waited_for: set[str] = set()
    while True:
        try:
            answer: dict[str, Any] = client.put(path, body)
        except ApiRefused as exc:
            if exc.code != "gate_not_passed" or not waits:
                raise
            evaluation_id = _find_open(client, name, alias, body, but=waited_for)
            if evaluation_id is None:  # none was started: the message says why
                raise
            waited_for.add(evaluation_id)
            follow_evaluation(client, name, evaluation_id, is_quiet=is_quiet)
        else:
            return answer


def _find_open(
    client: ApiClient, name: str, alias: str, body: dict[str, Any], *, but: Collection[str]
) -> str | None:
    """The evaluation that the gate requires, which may have ended since."""
    golden_set = client.get(api_path("adapters", name, "aliases", alias, "gate"))["golden_set"]
    versions = {body["version"], (body.get("canary") or {}).get("version")}
    found = client.get(api_path("adapters", name, "evaluations"), limit=100)["data"]
    wanted = [
        each
        for each in found
        if each["golden_set"] == golden_set
        and each["version"] in versions
        and each["id"] not in but
    ]
    is_open = [each["id"] for each in wanted if each["status"] not in ENDED]
    return next(iter(is_open or [each["id"] for each in wanted]), None)
