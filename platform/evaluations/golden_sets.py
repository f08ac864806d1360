"""Sets, finds and removes the golden sets of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select

from ..adapters.lookup import get_bare_adapter
from ..base import utc_now
from ..batches import files
from ..batches.file_models import FilePurpose, StoredFile
from ..errors import (
    FileInUse,
    GoldenSetInUse,
    GoldenSetNotFound,
    InvalidValue,
    QuotaExceeded,
)
from ..keys.principal import Principal
from ..names import check_golden_set_name
from ..quotas.repository import lock_tenant
from ..sessions import PlatformSession, TenantSession
from .models import AliasGate, GoldenSetRow

MAX_SETS = 100
"""Of one adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGoldenSet:
    """What a caller sets."""

    adapter_name: str
    name: str
    file_id: str
    num_cases: int
    tolerance: float
    judge: str | None
    key_id: str | None
    address: str | None
    created_by: str


def get_cases_file(session: TenantSession, file_id: str, *, viewer: Principal) -> StoredFile:
    """The file of a golden set. Raises FileNotFound, or InvalidValue if it has another purpose."""
    file = files.get_file(session, file_id, viewer=viewer)
    if file.purpose is not FilePurpose.EVALS:
        message = f"file: the purpose of this file is `{file.purpose}`, not `evals`"
        raise InvalidValue(message, param="file")
    return file


def put(session: TenantSession, new: NewGoldenSet, viewer: Principal) -> GoldenSetRow:
    """Set the golden set, whose file was checked. Evaluations that have begun keep their file.

    Raises InvalidValue, AdapterNotFound, FileNotFound or QuotaExceeded.
    """
    check_golden_set_name(new.name)
    lock_tenant(session)
    get_bare_adapter(session, new.adapter_name)
    file = get_cases_file(session, new.file_id, viewer=viewer)
    row = _find(session, new.adapter_name, new.name)
    if row is None:
        _check_room(session, new.adapter_name)
        row = GoldenSetRow(adapter_name=new.adapter_name, name=new.name)
    row.file_id, row.sha256, row.num_cases = file.id, file.sha256, new.num_cases
    row.tolerance, row.judge = new.tolerance, new.judge
    row.key_id, row.address, row.created_by = new.key_id, new.address, new.created_by
    row.updated_at = utc_now()
    session.add(row)
    session.flush()
    return row


def get(session: TenantSession, adapter_name: str, name: str) -> GoldenSetRow:
    """Raises AdapterNotFound or GoldenSetNotFound."""
    get_bare_adapter(session, adapter_name)
    found = _find(session, adapter_name, name)
    if found is None:
        raise GoldenSetNotFound(f"The adapter {adapter_name!r} has no golden set {name!r}.")
    return found


def list_sets(session: TenantSession, adapter_name: str) -> Sequence[GoldenSetRow]:
    """The adapter's sets by name. Raises AdapterNotFound."""
    get_bare_adapter(session, adapter_name)
    query = select(GoldenSetRow).where(GoldenSetRow.adapter_name == adapter_name)
    return session.scalars(query.order_by(GoldenSetRow.name)).all()


def remove(session: TenantSession, adapter_name: str, name: str) -> None:
    """Its file stays. Raises AdapterNotFound, GoldenSetNotFound or GoldenSetInUse."""
    lock_tenant(session)
    row = get(session, adapter_name, name)
    query = select(AliasGate).where(
        AliasGate.adapter_name == adapter_name, AliasGate.golden_set_name == name
    )
    gate = session.scalars(query.order_by(AliasGate.alias)).first()
    if gate is not None:
        raise GoldenSetInUse(f"The gate of the alias {gate.alias!r} needs the golden set {name!r}.")
    session.delete(row)
    session.flush()


def remove_all(session: TenantSession, adapter_name: str) -> None:
    """Remove the sets of a deleted adapter."""
    query = select(GoldenSetRow).where(GoldenSetRow.adapter_name == adapter_name)
    for row in session.scalars(query).all():
        session.delete(row)
    session.flush()


def check_file_unused(session: TenantSession, file_id: str) -> None:
    """Raises FileInUse if the file is that of a golden set."""
    lock_tenant(session)
    row = session.scalars(select(GoldenSetRow).where(GoldenSetRow.file_id == file_id)).first()
    if row is not None:
        raise FileInUse(
            f"The golden set `{row.name}` of `{row.adapter_name}` has this file: remove it first."
        )


def list_needed_files_of_all_tenants(session: PlatformSession) -> set[str]:
    """The ids of the files of golden sets."""
    return set(session.scalars(select(GoldenSetRow.file_id)))


def _find(session: TenantSession, adapter_name: str, name: str) -> GoldenSetRow | None:
    query = select(GoldenSetRow).where(
        GoldenSetRow.adapter_name == adapter_name, GoldenSetRow.name == name
    )
    return session.scalars(query).one_or_none()


def _check_room(session: TenantSession, adapter_name: str) -> None:
    query = select(func.count(GoldenSetRow.id)).where(GoldenSetRow.adapter_name == adapter_name)
    num_sets = session.scalar(query) or 0
    if num_sets >= MAX_SETS:
        raise QuotaExceeded("golden sets of one adapter", limit=MAX_SETS, used=num_sets)
