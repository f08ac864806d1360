"""Random calls of three tenants and the operators: none reads or changes another tenant's data."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from loraplex.platform.keys.principal import OperatorRole, Scope, TenantRole
from support.batches import completions, create, jsonl
from support.evaluations import put_set, start
from support.samples import add_sample
from support.server import ServerUnderTest
from support.tuning_jobs import create as create_job
from support.tuning_jobs import examples
from support.walk import MARKS, NAME, Caller, Tenant, Walk
from support.webhooks import add_webhook

pytestmark = pytest.mark.slow

NUM_STEPS = int(os.environ.get("LORAPLEX_STEPS", "1500"))


@pytest.fixture(scope="module")
def tenants(
    server: ServerUnderTest, adapters: list[Path]
) -> tuple[dict[str, Tenant], list[Caller]]:
    """Each with the adapter `bot`, a request that used it, and a caller of every role."""
    made: dict[str, Tenant] = {}
    callers: list[Caller] = []
    operators = {role: server.make_operator(f"walk-{role.value}", role) for role in OperatorRole}
    for slug, folder in zip(MARKS, adapters, strict=True):
        owner = server.make_caller(slug)
        owner.push(adapters[adapters.index(folder) - 1], NAME)
        owner.push(folder, NAME)
        answer = owner.http.post(
            "/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": 1}
        )
        batch = create(owner.openai, jsonl(completions(NAME, ["x"])))
        job = create_job(owner.openai, examples("slow", 100))
        owner.openai.fine_tuning.jobs.cancel(job.id)
        put_set(owner, [{"id": "a", "prompt": "x", "expected": "y"}])
        evaluation = start(owner, 1)["id"]
        stored = owner.openai.responses.create(
            model=NAME, input="x", max_output_tokens=1, store=True
        )
        tenant = made[slug] = Tenant(
            slug,
            requests={answer.headers["x-request-id"]},
            files={batch.input_file_id},
            batches={batch.id},
            jobs={job.id},
            evaluations={evaluation},
            responses={stored.id},
            webhooks={add_webhook(server, owner)},
            samples={add_sample(owner, NAME)},
        )
        callers.append(Caller(f"{slug} owner", owner.key, slug, frozenset(Scope)))
        for role in TenantRole:
            email = f"{role.value}@{tenant.mark}.example"
            user = owner.http.post("/v1/users", json={"email": email, "role": role}).json()
            body = {"name": role, "scopes": sorted(role.scopes), "user": user["id"]}
            key = owner.http.post("/v1/keys", json=body).json()["key"]
            callers.append(Caller(f"{slug} {role}", key, slug, role.scopes))
        for kind, key in operators.items():
            callers.append(Caller(f"{kind} in {slug}", key, slug, kind.scopes, is_operator=True))
    return made, callers


def test_no_caller_reads_or_changes_what_is_anothers(
    server: ServerUnderTest, tenants: tuple[dict[str, Tenant], list[Caller]]
) -> None:
    with closing(Walk(server.url, *tenants, seed=8)) as walk:
        walk.run(NUM_STEPS)
    assert sum(walk.outcomes.values()) >= NUM_STEPS * 0.9
    foreign = {action for action, status in walk.outcomes if "foreign" in action and status == 404}
    assert len(foreign) >= 7, "others' resources of every kind were asked for"
    assert {status for _, status in walk.outcomes} == {200, 201, 202, 204, 403, 404}
