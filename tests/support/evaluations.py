"""Golden sets and evaluations of a test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from support.server import Caller
from support.waiting import wait_for

ENDED = {"succeeded", "failed", "cancelled"}
SECONDS = 120.0


def upload_cases(caller: Caller, cases: Sequence[dict[str, Any]] | bytes) -> str:
    """The id of a file of cases."""
    content = cases
    if not isinstance(content, bytes):
        content = b"".join(json.dumps(case).encode() + b"\n" for case in content)
    return caller.openai.files.create(file=("golden.jsonl", content), purpose="evals").id


def put_set(
    caller: Caller, cases: Sequence[dict[str, Any]], name: str = "golden", **more: Any
) -> dict[str, Any]:
    """Set a golden set of the adapter `bot`."""
    answer = caller.http.put(
        f"/v1/adapters/bot/golden-sets/{name}", json={"file": upload_cases(caller, cases), **more}
    )
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = answer.json()
    return row


def start(caller: Caller, version: int, name: str = "golden", **more: Any) -> dict[str, Any]:
    """An evaluation of a version of `bot`."""
    answer = caller.http.post(
        "/v1/adapters/bot/evaluations", json={"version": version, "golden_set": name, **more}
    )
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = answer.json()
    return row


def get(caller: Caller, evaluation_id: str) -> dict[str, Any]:
    row: dict[str, Any] = caller.http.get(f"/v1/adapters/bot/evaluations/{evaluation_id}").json()
    return row


def ended(caller: Caller, evaluation_id: str) -> dict[str, Any]:
    """The evaluation when it has ended."""
    wait_for(lambda: get(caller, evaluation_id)["status"] in ENDED, seconds=SECONDS)
    return get(caller, evaluation_id)


def answer_of(caller: Caller, model: str, prompt: str) -> str:
    """The greedy answer, asked directly."""
    asked = caller.openai.completions.create(
        model=model, prompt=prompt, max_tokens=6, temperature=0
    )
    return asked.choices[0].text


def expecting(caller: Caller, model: str, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Cases that the model answers as expected."""
    return [
        {
            "id": prompt,
            "prompt": prompt,
            "expected": answer_of(caller, model, prompt),
            "request": {"max_tokens": 6},
        }
        for prompt in prompts
    ]
