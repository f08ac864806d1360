"""The table of files. Their bytes are in the object store."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Index, String, false
from sqlalchemy.orm import Mapped, mapped_column

from ..base import Base, TenantOwned, UtcDateTime, state_type, utc_now
from ..keys.token import KEY_ID_LENGTH

FILE_ID_LENGTH = 40
MAX_FILENAME_LENGTH = 255


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    """The input of batches, uploaded by the tenant."""
    BATCH_OUTPUT = "batch_output"
    """The results of a batch, or its errors."""
    FINE_TUNE = "fine-tune"
    """The data of fine-tuning jobs, uploaded by the tenant or made of samples."""
    EVALS = "evals"
    """The cases of golden sets, uploaded by the tenant or made of samples."""


class StoredFile(TenantOwned, Base):
    """A file of a tenant. It never changes."""

    __tablename__ = "files"
    __table_args__ = (
        Index("ix_files_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        Index("ix_files_expires_at", "expires_at"),
    )

    id: Mapped[str] = mapped_column(String(FILE_ID_LENGTH), primary_key=True)
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """The key that uploaded it, or whose batch wrote it; None for an operator or a user."""
    purpose: Mapped[FilePurpose] = mapped_column(state_type(FilePurpose, name="purpose"))
    filename: Mapped[str] = mapped_column(String(MAX_FILENAME_LENGTH))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    """Of its bytes, hexadecimal."""
    has_samples: Mapped[bool] = mapped_column(default=False, server_default=false())
    """It was made of samples: who may not read samples does not see it."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
