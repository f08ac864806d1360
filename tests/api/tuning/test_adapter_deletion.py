"""Deleting an adapter deletes its fine-tuning jobs that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sqlalchemy import select

from loraplex.api.adapters.deletions import Deletions
from loraplex.api.control_plane.control_plane import ControlPlane
from loraplex.api.control_plane.leases import Leases
from loraplex.platform.adapters.models import Adapter, AdapterVersion
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.audit.event import BY_SYSTEM
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tuning.models import TuningJob
from loraplex.platform.tuning.states import JobState
from support.catalog import make_tenant, make_version


def add_job(session: TenantSession, job_id: str, adapter_name: str, state: JobState) -> None:
    has_ended = state is JobState.CANCELLED
    session.add(
        TuningJob(
            id=job_id,
            adapter_name=adapter_name,
            created_by="key:ci",
            training_file_id="file-1",
            training_sha256="0" * 64,
            recipe={},
            state=state,
            ended_at=utc_now() if has_ended else None,
        )
    )


def delete_jobs_of(database: Database, delete: Callable[[Deletions, str], Any]) -> set[str]:
    """The jobs that are left. Another adapter has the same content, so no tier is touched."""
    tenant = make_tenant(database, "acme")
    with database.transaction(tenant.id) as session:
        for name in ("bot", "twin"):
            make_version(session, name, "same content")
            add_job(session, f"{name}-ended", name, JobState.CANCELLED)
            add_job(session, f"{name}-open", name, JobState.QUEUED)
    control_plane = ControlPlane(database, b"s" * 32)
    untouched: Any = None
    engine: Any = SimpleNamespace(forget_outputs=lambda key: None)

    async def run() -> None:
        deletions = Deletions(
            engine=engine,
            fetcher=untouched,
            store=untouched,
            control_plane=control_plane,
            leases=Leases(control_plane, "server"),
        )
        await delete(deletions, tenant.id)
        await deletions.close()

    asyncio.run(run())
    control_plane.close()
    with database.transaction(tenant.id, read_only=True) as session:
        deleted = select(Adapter.name).join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        is_deleted = AdapterVersion.state == VersionState.DELETED
        assert session.scalars(deleted.where(is_deleted)).all() == ["bot"]
        return set(session.scalars(select(TuningJob.id)))


def test_a_deleted_adapters_ended_jobs_are_deleted_and_open_ones_stay(database: Database) -> None:
    left = delete_jobs_of(
        database, lambda deletions, tenant_id: deletions.delete_adapter(tenant_id, "bot", BY_SYSTEM)
    )
    assert left == {"bot-open", "twin-ended", "twin-open"}


def test_the_deletion_of_a_version_deletes_no_job(database: Database) -> None:
    left = delete_jobs_of(
        database,
        lambda deletions, tenant_id: deletions.delete_version(tenant_id, "bot", 1, BY_SYSTEM),
    )
    assert left == {"bot-ended", "bot-open", "twin-ended", "twin-open"}
