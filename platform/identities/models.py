"""The tables for sign-in through an identity provider."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from ..accounts.models import HASH_LENGTH, MAX_ISSUER_LENGTH
from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime

MAX_SUBJECT_LENGTH = 255
"""OpenID Connect Core 1.0, section 2: at most 255 ASCII characters."""

_IS_OPERATORS = text("tenant_id IS NULL")


class Identity(TenantOwned, Base):
    """The identity of a user or operator at a provider. Kept while its owner is disabled.

    A person has at most one user in each tenant, and at most one operator.
    """

    __tablename__ = "identities"
    __table_args__ = (
        UniqueConstraint("tenant_id", "issuer", "subject"),
        Index(
            "uq_identities_operators",
            "issuer",
            "subject",
            unique=True,
            sqlite_where=_IS_OPERATORS,
            postgresql_where=_IS_OPERATORS,
        ),
    )

    tenant_id: Mapped[str | None] = mapped_column(  # type: ignore[assignment]
        String(ID_LENGTH), ForeignKey("tenants.id")
    )
    """The user's; None for an operator."""
    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    """The operator's or the user's own."""
    issuer: Mapped[str] = mapped_column(String(MAX_ISSUER_LENGTH))
    subject: Mapped[str] = mapped_column(String(MAX_SUBJECT_LENGTH))
    """The provider's name for the person, never the email address."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class SpentFlow(Base):
    """A sign-in flow that was completed or failed, so that nobody can repeat it."""

    __tablename__ = "spent_flows"

    id: Mapped[str] = mapped_column(String(HASH_LENGTH), primary_key=True)
    """The hash of its cookie."""
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """From then on the flow is refused as expired, and the row is not needed."""
