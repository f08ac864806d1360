"""A large catalog, written directly in the form that the normal path produces."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import insert

from loraplex.platform.adapters.models import Adapter, AdapterVersion
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.base import new_id, utc_now
from loraplex.platform.database import Database
from loraplex.platform.sessions import PlatformSession
from loraplex.platform.tenants.models import Tenant
from support.catalog import BASE_ID, make_digest

NUM_TENANTS = 2_000
NUM_OWNERS = 200
NUM_ADAPTERS = 5_000


def add_many(database: Database) -> None:
    """2,000 tenants `many-0000` and so on. The first 200 have 5,000 ready adapters together."""
    tenants = [
        {"id": new_id(), "slug": f"many-{number:04}", "name": f"Many {number}", "weight": 1.0}
        for number in range(NUM_TENANTS)
    ]
    per_tenant = NUM_ADAPTERS // NUM_OWNERS
    with database.platform_transaction() as session:
        session.execute(insert(Tenant), tenants)
        owners = [tenant["id"] for tenant in tenants[:NUM_OWNERS] for _ in range(per_tenant)]
        _add_adapters(session, [str(owner) for owner in owners], per_tenant)


def _add_adapters(session: PlatformSession, owners: list[str], per_tenant: int) -> None:
    now = utc_now()
    adapters, versions = [], []
    for number, owner in enumerate(owners):
        name, adapter_id = f"bot-{number % per_tenant:02}", new_id()
        created = now - timedelta(minutes=number)
        adapters.append(
            {
                "id": adapter_id,
                "tenant_id": owner,
                "name": name,
                "is_visible": True,
                "created_at": created,
            }
        )
        versions.append(
            {
                "id": new_id(),
                "tenant_id": owner,
                "adapter_id": adapter_id,
                "number": 1,
                "digest": make_digest(f"{owner} {name}"),
                "base_id": BASE_ID,
                "object_sha256": make_digest(name).removeprefix("sha256:"),
                "size_bytes": 1_000_000 + number,
                "state": VersionState.READY,
                "state_changed_at": created,
                "intake_report": {"max_rank": 8},
                "attestation_report": {"mean_shift": 1.5},
                "created_at": created,
            }
        )
    session.execute(insert(Adapter), adapters)
    session.execute(insert(AdapterVersion), versions)
