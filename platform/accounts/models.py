"""The tables for sign-in. A row without a tenant is an operator's; no tenant's role sees it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, state_type

HASH_LENGTH = 64
"""Characters of a SHA-256 in hexadecimal."""
MAX_PASSWORD_HASH_LENGTH = 256
MAX_ISSUER_LENGTH = 255


class AccountKind(StrEnum):
    """The kind of an account's owner."""

    OPERATOR = "operator"
    USER = "user"


class Account(TenantOwned, Base):
    """The sign-in data of an operator or a tenant's user. Created with the first invitation."""

    __tablename__ = "accounts"

    tenant_id: Mapped[str | None] = mapped_column(  # type: ignore[assignment]
        String(ID_LENGTH), ForeignKey("tenants.id")
    )
    """The user's; None for an operator."""
    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    """The operator's or the user's own."""
    kind: Mapped[AccountKind] = mapped_column(state_type(AccountKind, name="kind"))
    password_hash: Mapped[str | None] = mapped_column(String(MAX_PASSWORD_HASH_LENGTH))
    """In Argon2's format; None until the first invitation was used."""
    password_set_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    invitation_hash: Mapped[str | None] = mapped_column(String(HASH_LENGTH), unique=True)
    """The hash of the token that sets a password; None: there is none, or it was used."""
    invitation_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class AccountSession(TenantOwned, Base):
    """A console session, identified by the hash of its cookie."""

    __tablename__ = "account_sessions"
    __table_args__ = (
        Index("ix_account_sessions_account_id", "account_id"),
        Index("ix_account_sessions_expires_at", "expires_at"),
    )

    tenant_id: Mapped[str | None] = mapped_column(  # type: ignore[assignment]
        String(ID_LENGTH), ForeignKey("tenants.id")
    )
    """As the account's."""
    id: Mapped[str] = mapped_column(String(HASH_LENGTH), primary_key=True)
    account_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("accounts.id"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    seen_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """The time of the last use; see `service.SEEN_GRANULARITY`."""
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    confirmed_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Until then the confirmation by password or provider is valid."""
    issuer: Mapped[str | None] = mapped_column(String(MAX_ISSUER_LENGTH))
    """The identity provider that authenticated the person; None: signed in with the password."""


class SignInFailures(Base):
    """The number of recent failures, by a keyed hash of the name or of the address."""

    __tablename__ = "sign_in_failures"

    subject: Mapped[str] = mapped_column(String(HASH_LENGTH), primary_key=True)
    num_failures: Mapped[int]
    began_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the first of them was."""
    locked_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
