"""The table of replicas."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, JsonObject, UtcDateTime

ADDRESS_LENGTH = 300


class Replica(Base):
    """An agent's address, and what the agent that listens there last reported."""

    __tablename__ = "replicas"

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    """Decides the place of the replica in every adapter's order, so a new agent at the address
    serves the same adapters."""
    address: Mapped[str] = mapped_column(String(ADDRESS_LENGTH), unique=True)
    """`host:port`."""
    is_draining: Mapped[bool]
    """Whether it shall accept no further requests."""
    added_at: Mapped[datetime] = mapped_column(UtcDateTime)
    incarnation: Mapped[str | None] = mapped_column(String(64))
    """The agent's life; None before the first contact, like all below."""
    base_id: Mapped[str | None] = mapped_column(String(128))
    runtime_id: Mapped[str | None] = mapped_column(String(128))
    state: Mapped[str | None] = mapped_column(String(16))
    """`ready`, `draining` or `refusing`."""
    figures: Mapped[JsonObject | None] = mapped_column(JSON)
    """How busy it is: `engine.fleet.replica_figures.ReplicaFigures`."""
    seen_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """When its lease was last renewed."""
