"""Creates tenants, keys and adapter versions in a database, in the state that a test needs."""

from __future__ import annotations

import hashlib

from loraplex.platform.adapters import service as catalog
from loraplex.platform.adapters.models import Adapter, AdapterVersion
from loraplex.platform.adapters.service import NewVersion
from loraplex.platform.adapters.states import VersionState
from loraplex.platform.database import Database
from loraplex.platform.sessions import TenantSession
from loraplex.platform.tenants import service as tenants
from loraplex.platform.tenants.models import Tenant

BASE_ID = "base-of-the-tests"


def make_tenant(database: Database, slug: str) -> Tenant:
    """A committed tenant."""
    with database.platform_transaction() as session:
        return tenants.create_tenant(session, slug)


def make_digest(content: str) -> str:
    """The digest of an adapter that consists of this text."""
    return "sha256:" + hashlib.sha256(content.encode()).hexdigest()


def make_new_version(
    name: str = "support-bot", content: str = "weights", *, base_id: str = BASE_ID
) -> NewVersion:
    """What intake would hand on."""
    return NewVersion(
        adapter_name=name,
        digest=make_digest(content),
        base_id=base_id,
        object_sha256=hashlib.sha256(b"block of " + content.encode()).hexdigest(),
        size_bytes=len(content),
        intake_report={"num_tensors": 2},
    )


def make_version(
    session: TenantSession,
    name: str = "support-bot",
    content: str = "weights",
    *,
    state: VersionState = VersionState.READY,
    base_id: str = BASE_ID,
) -> AdapterVersion:
    """A version that went the ordinary way to its state."""
    created = catalog.create_version(session, make_new_version(name, content, base_id=base_id))
    bring_to(session, created.version, state)
    return created.version


def bring_to(session: TenantSession, version: AdapterVersion, state: VersionState) -> None:
    """Take a validated version the ordinary way to a state."""
    match state:
        case VersionState.VALIDATED:
            return
        case VersionState.ATTESTING:
            catalog.begin_attestation(session, version.id)
        case VersionState.READY:
            catalog.begin_attestation(session, version.id)
            catalog.mark_ready(session, version.id, attestation_report={"mean_shift": 1.5})
        case VersionState.REJECTED:
            catalog.begin_attestation(session, version.id)
            catalog.mark_rejected(
                session, version.id, reason="no_effect", message="It does nothing."
            )
        case VersionState.DELETING:
            bring_to(session, version, VersionState.READY)
            name = session.get_one(Adapter, version.adapter_id).name
            catalog.begin_version_deletion(session, name, version.number)
        case VersionState.DELETED:
            bring_to(session, version, VersionState.DELETING)
            catalog.finish_deletion(session, version.id)
