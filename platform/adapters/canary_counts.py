"""The sums of watched canaries in the database, to which all servers add."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from sqlalchemy import Executable, bindparam, delete, select

from ..sessions import TenantRows
from ..upserts import insert_into, primary_key
from .canary_models import CanaryCounts
from .canary_sums import SUMS, Arm, ArmSums, Split


def add(session: TenantRows, sums: Mapping[Arm, ArmSums]) -> None:
    """Add to the sums of the tenant's arms."""
    rows = [
        {
            "adapter_id": arm.split.adapter_id,
            "alias": arm.split.alias,
            "change_number": arm.split.change_number,
            "is_canary": arm.is_canary,
            **{name: getattr(each, name) for name in SUMS},
        }
        for arm, each in sorted(sums.items())  # in one order, so that writers do not deadlock
    ]
    session.execute_pinned(_add(session.dialect), rows)


def read(session: TenantRows, split: Split) -> tuple[ArmSums, ArmSums]:
    """The sums of the alias's own version and of its canary."""
    found = session.execute_pinned(_READ, _key(split)).mappings()
    by_arm = {row["is_canary"]: ArmSums(**{name: row[name] for name in SUMS}) for row in found}
    return by_arm.get(False, ArmSums()), by_arm.get(True, ArmSums())


def forget(session: TenantRows, adapter_id: str, alias: str) -> None:
    """Remove the sums of the alias."""
    session.execute_pinned(_FORGET, {"adapter_id": adapter_id, "alias": alias})


_COUNTS = CanaryCounts.__table__
_READ = select(_COUNTS).where(
    *(
        _COUNTS.c[name] == bindparam(name)
        for name in ("tenant_id", "adapter_id", "alias", "change_number")
    )
)
_FORGET = delete(CanaryCounts).where(
    *(_COUNTS.c[name] == bindparam(name) for name in ("tenant_id", "adapter_id", "alias"))
)


def _key(split: Split) -> dict[str, Any]:
    return {
        "adapter_id": split.adapter_id,
        "alias": split.alias,
        "change_number": split.change_number,
    }


@cache
def _add(dialect: str) -> Executable:
    statement = insert_into(CanaryCounts, dialect)
    added = {name: _COUNTS.c[name] + statement.excluded[name] for name in SUMS}
    key = primary_key(CanaryCounts)
    return cast(Executable, statement.on_conflict_do_update(index_elements=key, set_=added))
