"""Batches of a test, through the unmodified openai client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from openai import OpenAI
from openai.types import Batch

from support.waiting import wait_for

ENDED = {"completed", "failed", "expired", "cancelled"}
SECONDS = 60.0


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def completions(model: str, prompts: Sequence[str], **more: Any) -> list[dict[str, Any]]:
    """A line for each prompt, named by its place."""
    body = {"model": model, "max_tokens": 4, "temperature": 0, **more}
    return [line(f"line-{at}", {**body, "prompt": each}) for at, each in enumerate(prompts)]


def create(client: OpenAI, content: bytes, endpoint: Any = "/v1/completions", **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: OpenAI, batch_id: str, seconds: float = SECONDS) -> Batch:
    """The batch when it has ended."""
    batch = client.batches.retrieve(batch_id)

    def has_ended() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in ENDED

    wait_for(has_ended, seconds=seconds)
    return batch


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
