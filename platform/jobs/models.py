"""The table of job leases."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, UtcDateTime

MAX_JOB_NAME_LENGTH = 64


class JobLease(Base):
    """The right to do one job, until it expires."""

    __tablename__ = "job_leases"

    name: Mapped[str] = mapped_column(String(MAX_JOB_NAME_LENGTH), primary_key=True)
    server_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """None: no holder."""
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """When it was last completed, by any server."""
