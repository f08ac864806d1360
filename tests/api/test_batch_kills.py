"""A server killed between any two effects of a batch, and another server that takes a batch over:
each line has one result, and is charged once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from openai import APIConnectionError, OpenAI
from sqlalchemy import select

from loraplex.adapters.failpoints import BATCH_FAILPOINTS, VARIABLE
from loraplex.platform.models import JobLease, UsageRecord
from support.batches import completions, create, ended, jsonl, lines_of
from support.server import FAKE_ENGINE, Caller, ServerUnderTest, live_until, serving

pytestmark = pytest.mark.slow

NUM_LINES = 40
NAME = ("--served-model-name", "tiny")


def lines(max_tokens: int = 3) -> bytes:
    prompts = [f"prompt {number}" for number in range(NUM_LINES)]
    return jsonl(completions("tiny", prompts, max_tokens=max_tokens, temperature=1.0))


def check_exact(server: ServerUnderTest, caller: Caller, client: OpenAI, batch_id: str) -> None:
    """Every line has one answer, and the ledger has these answers' usage and nothing else."""
    batch = ended(client, batch_id, seconds=120)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    answers = lines_of(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(NUM_LINES)]
    database = server.database
    with database.transaction(caller.tenant_id, read_only=True) as session:
        rows = {row.request_id: row for row in session.scalars(select(UsageRecord))}
    database.close()
    assert rows.keys() == {each["response"]["request_id"] for each in answers}
    for each in answers:
        usage = each["response"]["body"]["usage"]
        row = rows[each["response"]["request_id"]]
        assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )


def test_a_batch_that_is_killed_after_each_effect_is_exact(tiny_base: Path, tmp_path: Path) -> None:
    """Each start of the server resumes it, comes to the next failpoint, and is killed there."""
    checked, *later = [point for point in BATCH_FAILPOINTS if point.startswith("batches.")]
    with serving(tiny_base, tmp_path, *NAME, engine=FAKE_ENGINE, **{VARIABLE: checked}) as armed:
        caller = armed.make_caller("acme")
        batch_id = create(caller.openai, lines()).id
        assert armed.process.wait(60) == -signal.SIGKILL
    for point in later:
        live_until(point, tiny_base, tmp_path, *NAME, engine=FAKE_ENGINE)
    with serving(tiny_base, tmp_path, *NAME, engine=FAKE_ENGINE) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=caller.key)
        check_exact(server, caller, client, batch_id)


def test_a_file_whose_upload_or_deletion_was_killed_is_not_there(
    tiny_base: Path, tmp_path: Path
) -> None:
    """Nothing of an upload that was not acknowledged, and nothing of a deletion's file."""

    def upload(client: OpenAI) -> str:
        return client.files.create(file=("in.jsonl", b"{}"), purpose="batch").id

    stored, removed = ({VARIABLE: point} for point in ("files.stored", "files.removed"))
    with serving(tiny_base, tmp_path, *NAME, engine=FAKE_ENGINE, **stored) as server:
        caller = server.make_caller("acme")
        with pytest.raises(APIConnectionError):
            upload(caller.openai)
        assert server.process.wait(60) == -signal.SIGKILL
    with serving(tiny_base, tmp_path, *NAME, engine=FAKE_ENGINE, **removed) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=caller.key, max_retries=0)
        assert list(client.files.list()) == []
        file_id = upload(client)
        with pytest.raises(APIConnectionError):
            client.files.delete(file_id)
        assert server.process.wait(60) == -signal.SIGKILL
    with serving(tiny_base, tmp_path, *NAME, engine=FAKE_ENGINE) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=caller.key)
        assert list(client.files.list()) == []


def test_another_server_takes_over_when_one_dies(tiny_base: Path, tmp_path: Path) -> None:
    armed_at = {VARIABLE: "batches.kept"}
    with serving(tiny_base, tmp_path / "1", *NAME, engine=FAKE_ENGINE, **armed_at) as first:
        caller = first.make_caller("acme")
        batch_id = create(caller.openai, lines()).id
        assert first.process.wait(60) == -signal.SIGKILL
    shared = {
        "LORAPLEX_DATABASE": first.settings.database_url,
        "LORAPLEX_STORE": first.settings.store_url,
        "LORAPLEX_SECRET": first.settings.load_secrets()[0].hex(),
    }
    with serving(tiny_base, tmp_path / "2", *NAME, engine=FAKE_ENGINE, **shared) as second:
        client = OpenAI(base_url=f"{second.url}/v1", api_key=caller.key)
        assert client.batches.retrieve(batch_id).status == "in_progress", "the lease holds"
        assert end_leases(second) == 1
        check_exact(second, caller, client, batch_id)


def end_leases(server: ServerUnderTest) -> int:
    """A minute passes for the leases of the dead server. Returns how many it held."""
    database = server.database
    with database.platform_transaction() as session:
        leases = session.scalars(select(JobLease).where(JobLease.name.like("batch:%"))).all()
        held = [lease for lease in leases if lease.server_id is not None]
        for lease in held:
            lease.expires_at = lease.expires_at and lease.expires_at.replace(year=2000)
    database.close()
    return len(held)
