"""Columns and types of the first revision's tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

ID = sa.String(36)
KEY_ID = sa.String(12)
REQUEST_ID = sa.String(64)
NAME = sa.String(64)
AUTHOR = sa.String(300)
DIGEST = sa.String(71)
MOMENT = sa.DateTime(timezone=True)


def tenant_id(**options: Any) -> sa.Column[str]:
    """Whose row it is."""
    return sa.Column("tenant_id", ID, sa.ForeignKey("tenants.id"), **{"nullable": False, **options})


def one_of(name: str, *values: str, **options: Any) -> sa.Column[str]:
    """A column of a closed set, which a check guards."""
    kind = sa.Enum(*values, name=name, native_enum=False, create_constraint=True, length=16)
    return sa.Column(name, kind, nullable=False, **options)
