"""The tables of batches and of the results of their lines."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from ..base import Base, JsonObject, TenantOwned, UtcDateTime, state_type, utc_now
from ..keys.token import KEY_ID_LENGTH
from .file_models import FILE_ID_LENGTH
from .states import BatchState

BATCH_ID_LENGTH = 40
MAX_ENDPOINT_LENGTH = 64
MAX_ADDRESS_LENGTH = 45


class Batch(TenantOwned, Base):
    """One batch. Its lease is the job lease `batch:` and its id."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        Index("ix_batches_state", "state"),
    )

    id: Mapped[str] = mapped_column(String(BATCH_ID_LENGTH), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(KEY_ID_LENGTH))
    """The key that created it: each line is a request of this key."""
    address: Mapped[str | None] = mapped_column(String(MAX_ADDRESS_LENGTH))
    """From which it was created; None: a Unix socket."""
    endpoint: Mapped[str] = mapped_column(String(MAX_ENDPOINT_LENGTH))
    """The route of every line."""
    input_file_id: Mapped[str] = mapped_column(String(FILE_ID_LENGTH))
    state: Mapped[BatchState] = mapped_column(state_type(BatchState))
    labels: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    """The caller's `metadata`."""
    errors: Mapped[list[JsonObject] | None] = mapped_column(JSON(none_as_null=True))
    """Why its file is invalid."""
    num_lines: Mapped[int] = mapped_column(default=0)
    """0 until its file was checked."""
    num_completed: Mapped[int] = mapped_column(default=0)
    """Of a batch that has ended, as the next; before, its results are counted."""
    num_failed: Mapped[int] = mapped_column(default=0)
    output_file_id: Mapped[str | None] = mapped_column(String(FILE_ID_LENGTH))
    error_file_id: Mapped[str | None] = mapped_column(String(FILE_ID_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    """The end of its completion window."""
    in_progress_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finalizing_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """From then on no result is added."""
    cancelling_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class BatchResult(TenantOwned, Base):
    """The result of one line, until the batch ends and its results are files."""

    __tablename__ = "batch_results"

    batch_id: Mapped[str] = mapped_column(
        String(BATCH_ID_LENGTH), ForeignKey("batches.id"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The line's, from 0."""
    is_success: Mapped[bool]
    content: Mapped[bytes] = mapped_column(LargeBinary)
    """The line of the output or error file, without its line end."""
