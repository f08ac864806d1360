"""The tables of fine-tuning jobs, of their events, and of their checkpoints and stored bytes."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from ..adapters.models import DIGEST_LENGTH, REASON_LENGTH, SHA256_HEX_LENGTH
from ..base import ID_LENGTH, Base, JsonObject, TenantOwned, UtcDateTime, state_type, utc_now
from ..batches.file_models import FILE_ID_LENGTH
from ..keys.principal import AUTHOR_LENGTH
from ..keys.token import KEY_ID_LENGTH
from ..names import MAX_NAME_LENGTH
from ..quotas.holder import Holder, payers_of
from .states import JobState

JOB_ID_LENGTH = 40
EVENT_ID_LENGTH = 40
CHECKPOINT_ID_LENGTH = 40
WORD_LENGTH = 16


class TuningJob(TenantOwned, Base):
    """One job. The lease on a tenant's jobs is the job lease `tuning:` and the tenant's id."""

    __tablename__ = "tuning_jobs"
    __table_args__ = (
        Index("ix_tuning_jobs_tenant_id_created_at_id", "tenant_id", "created_at", "id"),
        Index("ix_tuning_jobs_tenant_id_started_at", "tenant_id", "started_at"),
        Index("ix_tuning_jobs_state", "state"),
    )

    id: Mapped[str] = mapped_column(String(JOB_ID_LENGTH), primary_key=True)
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    """The adapter of which the result becomes a version."""
    created_by: Mapped[str] = mapped_column(String(AUTHOR_LENGTH))
    """The author of the job and of the version, as `Actor.author` formats it."""
    user_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """Who created it, or owns the key that did, by value: its budgets pay for the job, as those of
    the key; None: a machine's key, or an operator."""
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """The key that created it, or its successor, by value; None: a signed-in user, or an
    operator."""
    training_file_id: Mapped[str] = mapped_column(String(FILE_ID_LENGTH))
    training_sha256: Mapped[str] = mapped_column(String(SHA256_HEX_LENGTH))
    validation_file_id: Mapped[str | None] = mapped_column(String(FILE_ID_LENGTH))
    validation_sha256: Mapped[str | None] = mapped_column(String(SHA256_HEX_LENGTH))
    recipe: Mapped[JsonObject] = mapped_column(JSON)
    """How it is trained, every value resolved; the control plane does not interpret it."""
    labels: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    """The caller's `metadata`."""
    state: Mapped[JobState] = mapped_column(state_type(JobState))
    server_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    """The server that has its folder; None: it was never begun."""
    num_steps: Mapped[int] = mapped_column(default=0)
    """0 until its data is read."""
    step: Mapped[int] = mapped_column(default=0)
    """The last step whose tokens are counted."""
    num_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    """Tokens of the steps up to `step`: what the tenant's usage has of this job."""
    token_price: Mapped[int] = mapped_column(BigInteger, default=0, server_default=text("0"))
    """Of a million trained tokens, in 1e-9 of the currency's unit: what was in effect when the job
    was created."""
    pause_reason: Mapped[str | None] = mapped_column(String(WORD_LENGTH))
    """A `PauseReason`; None: it is not paused, or a release without reasons paused it."""
    num_restarts: Mapped[int] = mapped_column(default=0)
    """How often its trainer ended without a result."""
    error_code: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    error_message: Mapped[str | None] = mapped_column(Text)
    error_param: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    """The field of the job that was wrong."""
    version: Mapped[int | None]
    """The number of the resulting version."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """When it was begun for the last time, from its start or from a checkpoint."""
    finalizing_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """From then on its adapter is published, and it can be neither paused nor cancelled."""
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

    @property
    def payers(self) -> tuple[Holder, ...]:
        """Whose budgets of money it is charged to."""
        return payers_of(self.user_id, self.key_id)


class TuningEvent(TenantOwned, Base):
    """What happened in a job. The oldest are removed when there are too many."""

    __tablename__ = "tuning_events"
    __table_args__ = (Index("ix_tuning_events_job_id_number", "job_id", "number"),)

    id: Mapped[str] = mapped_column(String(EVENT_ID_LENGTH), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(JOB_ID_LENGTH), ForeignKey("tuning_jobs.id"))
    number: Mapped[int]
    """Its place among the job's, from 1."""
    level: Mapped[str] = mapped_column(String(WORD_LENGTH))
    """`info`, `warn` or `error`."""
    kind: Mapped[str] = mapped_column(String(WORD_LENGTH))
    """`message` or `metrics`."""
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)


class TuningCheckpoint(TenantOwned, Base):
    """The figures of a checkpoint, whether its bytes are kept or not."""

    __tablename__ = "tuning_checkpoints"
    __table_args__ = (Index("ix_tuning_checkpoints_job_id_step", "job_id", "step"),)

    id: Mapped[str] = mapped_column(String(CHECKPOINT_ID_LENGTH), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(JOB_ID_LENGTH), ForeignKey("tuning_jobs.id"))
    step: Mapped[int]
    train_loss: Mapped[float | None] = mapped_column(Float)
    train_accuracy: Mapped[float | None] = mapped_column(Float)
    valid_loss: Mapped[float | None] = mapped_column(Float)
    valid_accuracy: Mapped[float | None] = mapped_column(Float)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)


class StoredCheckpoint(TenantOwned, Base):
    """A checkpoint whose bytes are in the object store, for a server that takes over the job."""

    __tablename__ = "stored_checkpoints"
    __table_args__ = (Index("ix_stored_checkpoints_job_id_step", "job_id", "step"),)

    id: Mapped[str] = mapped_column(String(CHECKPOINT_ID_LENGTH), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(JOB_ID_LENGTH), ForeignKey("tuning_jobs.id"))
    step: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(SHA256_HEX_LENGTH))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    runtime_id: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    """Of the base as its server serves it. With other values, nobody resumes from it."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
