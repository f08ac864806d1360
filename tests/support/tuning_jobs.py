"""Fine-tuning jobs of a test, through the unmodified openai client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob
from sqlalchemy import select

from loraplex.platform.models import UsageDay
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

ENDED = {"succeeded", "failed", "cancelled"}
SECONDS = 120.0


def examples(words: str = "", num: int = 6) -> bytes:
    """So many examples; the words are for `support.fake_trainer`."""
    return b"".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": words or "hi"},
                    {"role": "assistant", "content": "a" * (number + 1)},
                ]
            }
        ).encode()
        + b"\n"
        for number in range(num)
    )


def num_tokens(num: int = 6, num_epochs: int = 1) -> int:
    """What the trainer of `support.fake_trainer` counts for these examples."""
    return num_epochs * sum(range(1, num + 1))


def upload(client: OpenAI, content: bytes | None = None) -> str:
    """The id of a file of training data."""
    file = client.files.create(file=("data.jsonl", content or examples()), purpose="fine-tune")
    return file.id


def create(
    client: OpenAI, content: bytes | None = None, *, num_epochs: int = 1, **more: Any
) -> FineTuningJob:
    """A job over these examples."""
    method: Any = {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": num_epochs}},
    }
    asked = {"model": "tiny", "suffix": "bot", "method": method, "seed": 7, **more}
    return client.fine_tuning.jobs.create(training_file=upload(client, content), **asked)


def ended(client: OpenAI, job_id: str, seconds: float = SECONDS) -> FineTuningJob:
    """The job when it has ended."""
    job = client.fine_tuning.jobs.retrieve(job_id)

    def has_ended() -> bool:
        nonlocal job
        job = client.fine_tuning.jobs.retrieve(job_id)
        return job.status in ENDED

    wait_for(has_ended, seconds=seconds)
    return job


def messages(client: OpenAI, job_id: str) -> list[str]:
    """The texts of the job's events, the oldest first."""
    events = client.fine_tuning.jobs.list_events(job_id, limit=100)
    return [event.message for event in events][::-1]


def trained_tokens(server: ServerUnderTest, caller: Caller) -> int:
    """What the tenant's usage has of its jobs."""
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        days = session.scalars(select(UsageDay.trained_tokens)).all()
    database.close()
    return sum(days)


def trainers(server: ServerUnderTest) -> list[int]:
    """The process ids of the server's trainers."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    found = []
    for child in map(int, children.split()):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if b"support.fake_trainer" in command:
            found.append(child)
    return found
