"""Follows an evaluation of the server in the terminal."""

from __future__ import annotations

import time
from typing import Any

from ..client.api_client import ApiClient, api_path
from ..client.errors import ServerUnreachable
from ..client.polling import pauses
from .exit_codes import CommandFailed
from .output import note

ENDED = frozenset({"succeeded", "failed", "cancelled"})


def follow_evaluation(
    client: ApiClient, adapter: str, evaluation_id: str, *, is_quiet: bool
) -> dict[str, Any]:
    """The evaluation when it has succeeded, with its cases. A server that is away for a while is
    waited for. Raises CommandFailed if the evaluation fails or is cancelled."""
    path = api_path("adapters", adapter, "evaluations", evaluation_id)
    shown = ""
    for pause in pauses():
        try:
            evaluation: dict[str, Any] = client.get(path)
            said = _progress(client, evaluation)
        except ServerUnreachable as exc:
            said = str(exc)
        else:
            if evaluation["status"] in ENDED:
                break
        if said != shown and not is_quiet:
            note(said)
        shown = said
        time.sleep(pause)
    if (error := evaluation["error"]) is not None:
        raise CommandFailed(f"{error['message']} ({error['code']})")
    if evaluation["status"] != "succeeded":
        raise CommandFailed(f"The evaluation {evaluation_id} was {evaluation['status']}.")
    return evaluation


def _progress(client: ApiClient, evaluation: dict[str, Any]) -> str:
    """A line with the answers so far of its last batch."""
    head = f"{evaluation['id']}: {evaluation['status']}"
    if evaluation["status"] in ENDED or not evaluation["batches"]:
        return head
    name, batch_id = list(evaluation["batches"].items())[-1]
    counts = client.get(api_path("batches", batch_id))["request_counts"]
    return f"{head}, {name} {counts['completed'] + counts['failed']} of {counts['total']}"
