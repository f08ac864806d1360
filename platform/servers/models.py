"""The table of servers."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, UtcDateTime


class Server(Base):
    """A server: a data folder with its lock, so that it runs at most once."""

    __tablename__ = "servers"

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    """Written in its data folder: the same after a restart."""
    name: Mapped[str] = mapped_column(String(255))
    """Its host's."""
    version: Mapped[str] = mapped_column(String(32))
    base_id: Mapped[str] = mapped_column(String(128))
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    stopped_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """When it reported its stop; None while it runs, and after a crash."""
    evicted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """It has released all content that was being deleted at this time."""
