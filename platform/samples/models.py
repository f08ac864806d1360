"""The table of samples."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKeyConstraint, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, state_type
from ..keyring import SECRET_ID_LENGTH
from ..usage.models import REQUEST_ID_LENGTH

SAMPLE_ID_LENGTH = 40
_WORD_LENGTH = 16


class SampleKind(StrEnum):
    """What the prompt of a sample is."""

    CHAT = "chat"
    """Messages: of a chat completion, a response or a message."""
    COMPLETION = "completion"
    """A text."""


class ExportFormat(StrEnum):
    """What a file of samples is for."""

    TRAINING = "training"
    """The data of fine-tuning jobs."""
    GOLDEN = "golden"
    """A golden set, on which versions are compared."""


class Sample(TenantOwned, Base):
    """A request to an adapter and its complete answer."""

    __tablename__ = "samples"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_number"],
            [
                "adapter_versions.tenant_id",
                "adapter_versions.adapter_id",
                "adapter_versions.number",
            ],
            name="fk_samples_version_number_adapter_versions",
        ),
        Index(
            "ix_samples_tenant_id_adapter_id_created_at_id",
            *("tenant_id", "adapter_id", "created_at", "id"),
        ),
        Index("ix_samples_tenant_id_size_bytes", "tenant_id", "size_bytes"),
        Index("ix_samples_expires_at", "expires_at"),
        Index("ix_samples_created_at", "created_at"),
        Index("ix_samples_secret_id", "secret_id"),
    )

    id: Mapped[str] = mapped_column(String(SAMPLE_ID_LENGTH), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    version_number: Mapped[int]
    request_id: Mapped[str] = mapped_column(String(REQUEST_ID_LENGTH))
    kind: Mapped[SampleKind] = mapped_column(state_type(SampleKind, name="kind"))
    finish_reason: Mapped[str] = mapped_column(String(_WORD_LENGTH))
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    size_bytes: Mapped[int]
    """Of the content before it is encrypted."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the answer was complete."""
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    secret_id: Mapped[str] = mapped_column(String(SECRET_ID_LENGTH))
    """The server's secret under which the content is encrypted."""
    content: Mapped[bytes] = mapped_column(LargeBinary)
    """Prompt and answer: JSON, encrypted; see `SampleSeal`."""
