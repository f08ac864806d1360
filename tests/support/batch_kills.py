"""A batch on a server that is killed again and again; then its results against the ledger."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from openai import OpenAI
from sqlalchemy import select

from loraplex.platform.batches import service
from loraplex.platform.database import Database
from loraplex.platform.models import UsageRecord
from support.batches import completions, create, ended, jsonl, lines_of
from support.mortal_server import mortal_server
from support.server import FAKE_ENGINE, Caller
from support.waiting import wait_for

SECONDS = 3600.0
"""The longest time between two kills."""


def run_with_kills(
    base: Path, directory: Path, *, num_lines: int, num_kills: int, engine: str = FAKE_ENGINE
) -> dict[str, int]:
    """Kill the server and its engine at `num_kills` points that divide the batch evenly; what
    differs between the results and the ledger in the end."""
    prompts = [f"prompt {number}" for number in range(num_lines)]
    content = jsonl(completions(base.name, prompts, max_tokens=8, temperature=1.0))
    with mortal_server(base, directory, engine=engine) as mortal:
        mortal.start()
        caller = mortal.as_server().make_caller("acme")
        client = OpenAI(base_url=f"{mortal.url}/v1", api_key=caller.key)
        batch_id = create(client, content).id
        database = Database(mortal.settings.database_url)
        for kill in range(1, num_kills + 1):
            enough = num_lines * kill // (num_kills + 1)
            wait_for(
                lambda enough=enough: _num_results(database, caller, batch_id) >= enough,  # type: ignore[misc]
                seconds=SECONDS,
            )
            mortal.kill()
            mortal.start()
        batch = ended(client, batch_id, seconds=SECONDS)
        answers = lines_of(client, batch.output_file_id)
        errors = lines_of(client, batch.error_file_id)
        report = compare(database, caller, answers, num_lines)
        database.close()
        client.close()
    return {"lines": num_lines, "kills": num_kills, "errors": len(errors), **report}


def compare(
    database: Database, caller: Caller, answers: list[dict[str, Any]], num_lines: int
) -> dict[str, int]:
    """How many lines have no answer, or several; how many rows of the ledger have no answer, or
    another usage than it."""
    with database.transaction(caller.tenant_id, read_only=True) as session:
        rows = {row.request_id: row for row in session.scalars(select(UsageRecord))}
    seen = Counter(each["custom_id"] for each in answers)
    paid = {each["response"]["request_id"]: each["response"]["body"]["usage"] for each in answers}
    return {
        "missing": sum(f"line-{number}" not in seen for number in range(num_lines)),
        "repeated": sum(count > 1 for count in seen.values()),
        "charged_without_answer": len(rows.keys() - paid.keys()),
        "answers_without_charge": len(paid.keys() - rows.keys()),
        "other_usage": sum(
            (row.prompt_tokens, row.completion_tokens, row.cached_tokens)
            != (
                paid[name]["prompt_tokens"],
                paid[name]["completion_tokens"],
                paid[name]["prompt_tokens_details"]["cached_tokens"],
            )
            for name, row in rows.items()
            if name in paid
        ),
    }


def _num_results(database: Database, caller: Caller, batch_id: str) -> int:
    with database.transaction(caller.tenant_id, read_only=True) as session:
        batch = service.get_batch(session, batch_id)
        return sum(service.count_results(session, batch))
