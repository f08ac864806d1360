"""Samples, in a database and of a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import select

from loraplex.platform.adapters.models import AdapterVersion
from loraplex.platform.adapters.sampling import set_sampling
from loraplex.platform.base import utc_now
from loraplex.platform.samples import service
from loraplex.platform.samples.models import SampleKind
from loraplex.platform.samples.sample_seal import SampleSeal
from loraplex.platform.samples.service import Added, NewSample
from loraplex.platform.sessions import TenantSession
from support.server import Caller, ServerUnderTest

SEAL = SampleSeal([b"s" * 32])
PLAIN = {"messages": [{"role": "user", "content": "Hi"}], "answer": {"content": "Hello"}}


def opt_in(session: TenantSession, name: str = "support-bot", *, days: int = 7) -> None:
    """Sample every request of the adapter."""
    set_sampling(
        session, name, percent=100.0, days=days, max_days=30, changed_by="user:a@b.example"
    )


def new_sample(
    version: AdapterVersion,
    *,
    text: str = "Hello",
    kind: SampleKind = SampleKind.CHAT,
    finish_reason: str = "stop",
    at: datetime | None = None,
) -> NewSample:
    """A complete request to the version."""
    content = PLAIN | {"answer": {"content": text}}
    return NewSample(
        adapter_id=version.adapter_id,
        version_number=version.number,
        request_id="req-1",
        kind=kind,
        finish_reason=finish_reason,
        prompt_tokens=3,
        completion_tokens=2,
        created_at=at or utc_now(),
        content=json.dumps(content).encode(),
    )


def add(session: TenantSession, *new: NewSample, max_days: int = 30) -> Added:
    """Write the samples."""
    return service.add_all(session, new, SEAL, max_days=max_days)


def sample_all(caller: Caller, name: str, *, days: int = 7) -> None:
    """Keep every request of the adapter."""
    body = {"percent": 100, "days": days}
    caller.http.put(f"/v1/adapters/{name}/sampling", json=body).raise_for_status()


def samples_of(caller: Caller, name: str) -> list[dict[str, Any]]:
    """The adapter's samples without content, the newest first."""
    answer = caller.http.get(f"/v1/adapters/{name}/samples")
    assert answer.is_success, answer.text
    listed: list[dict[str, Any]] = answer.json()["data"]
    return listed


def add_sample(caller: Caller, name: str) -> str:
    """The id of the sample of a request; the adapter is not sampled afterwards."""
    sample_all(caller, name)
    body = {"model": name, "prompt": "x", "max_tokens": 1}
    caller.http.post("/v1/completions", json=body).raise_for_status()
    (newest, *_) = samples_of(caller, name)
    caller.http.delete(f"/v1/adapters/{name}/sampling").raise_for_status()
    return str(newest["id"])


def write_samples(
    server: ServerUnderTest, caller: Caller, make: Callable[[AdapterVersion], list[NewSample]]
) -> None:
    """Add samples of the tenant's only version, which is sampled, to the server's database."""
    database, seal = server.database, SampleSeal(server.settings.load_secrets())
    with database.transaction(caller.tenant_id) as session:
        new = make(session.scalars(select(AdapterVersion)).one())
        assert service.add_all(session, new, seal, max_days=30).num_kept == len(new)
    database.close()
