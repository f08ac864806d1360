"""The tables of webhooks: endpoints, and the outbox of events to deliver to them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, state_type, utc_now
from ..keyring import SECRET_ID_LENGTH
from ..keys.principal import AUTHOR_LENGTH
from .event_types import DeliveryState
from .target import MAX_URL_LENGTH

WEBHOOK_ID_LENGTH = 40
MAX_DESCRIPTION_LENGTH = 200
_WORD_LENGTH = 32


class WebhookEndpoint(TenantOwned, Base):
    """Where a tenant wants its events; callers know it as a webhook."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("ix_webhook_endpoints_tenant_id", "tenant_id"),)

    id: Mapped[str] = mapped_column(String(WEBHOOK_ID_LENGTH), primary_key=True)
    url: Mapped[str] = mapped_column(String(MAX_URL_LENGTH))
    description: Mapped[str | None] = mapped_column(String(MAX_DESCRIPTION_LENGTH))
    events: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """The types that are sent; None: all."""
    secret: Mapped[bytes] = mapped_column(LargeBinary)
    """Encrypted; see `SigningSecrets`."""
    previous_secret: Mapped[bytes | None] = mapped_column(LargeBinary)
    previous_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Until then events are also signed with the previous secret."""
    secret_id: Mapped[str] = mapped_column(String(SECRET_ID_LENGTH))
    """The server's secret under which both are encrypted."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    created_by: Mapped[str] = mapped_column(String(AUTHOR_LENGTH))
    failing_since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Of the first failed attempt after the last successful one."""
    num_dropped: Mapped[int] = mapped_column(default=0)
    """Events that were not kept, because too many were pending."""
    disabled_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    disabled_by: Mapped[str | None] = mapped_column(String(_WORD_LENGTH))
    """A `DisabledBy`."""


class WebhookDelivery(TenantOwned, Base):
    """One event for one endpoint."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_endpoint_id_created_at_id", "endpoint_id", "created_at", "id"),
        Index("ix_webhook_deliveries_endpoint_id_state", "endpoint_id", "state"),
        Index("ix_webhook_deliveries_state_due_at", "state", "due_at"),
        Index("ix_webhook_deliveries_created_at", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(
        String(WEBHOOK_ID_LENGTH), ForeignKey("webhook_endpoints.id")
    )
    event_id: Mapped[str] = mapped_column(String(WEBHOOK_ID_LENGTH))
    """The same for every endpoint and attempt."""
    type: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    """An `EventType`, or `TEST`."""
    body: Mapped[bytes] = mapped_column(LargeBinary)
    """What is sent: JSON."""
    state: Mapped[DeliveryState] = mapped_column(state_type(DeliveryState))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    due_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the next attempt begins; during an attempt, when its server is taken for stopped."""
    server_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """The server that makes an attempt; None: no server."""
    num_attempts: Mapped[int] = mapped_column(default=0)
    """Including the present one."""
    last_status: Mapped[int | None]
    """HTTP status of the last answer."""
    last_failure: Mapped[str | None] = mapped_column(String(_WORD_LENGTH))
    """Of the last attempt, a `Failure`; None: it has not failed."""
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
