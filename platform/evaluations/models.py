"""The tables of golden sets, of evaluations and of the gates of aliases."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, Float, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from ..adapters.history import EVALUATION_ID_LENGTH
from ..adapters.models import DIGEST_LENGTH, REASON_LENGTH, SHA256_HEX_LENGTH
from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime, new_id, state_type, utc_now
from ..batches.file_models import FILE_ID_LENGTH
from ..batches.models import BATCH_ID_LENGTH, MAX_ADDRESS_LENGTH
from ..keys.principal import AUTHOR_LENGTH
from ..keys.token import KEY_ID_LENGTH
from ..names import MAX_NAME_LENGTH
from .states import EvaluationState

MAX_MODEL_LENGTH = 256


class GoldenSetRow(TenantOwned, Base):
    """A golden set of an adapter: a file of cases, and how answers to them are compared."""

    __tablename__ = "golden_sets"
    __table_args__ = (
        UniqueConstraint("tenant_id", "adapter_name", "name"),
        Index("ix_golden_sets_tenant_id_file_id", "tenant_id", "file_id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    file_id: Mapped[str] = mapped_column(String(FILE_ID_LENGTH))
    sha256: Mapped[str] = mapped_column(String(SHA256_HEX_LENGTH))
    """Of the file's bytes."""
    num_cases: Mapped[int]
    tolerance: Mapped[float] = mapped_column(Float)
    """The loss of mean score that is no regression."""
    judge: Mapped[str | None] = mapped_column(String(MAX_MODEL_LENGTH))
    """The model that judges cases with the scorer `judge`."""
    key_id: Mapped[str | None] = mapped_column(String(KEY_ID_LENGTH))
    """The key that set it: evaluations of callers who have none are requests of this one. None if
    it was set without a key, or the key may not ask."""
    address: Mapped[str | None] = mapped_column(String(MAX_ADDRESS_LENGTH))
    """From which it was set; None: a Unix socket."""
    created_by: Mapped[str] = mapped_column(String(AUTHOR_LENGTH))
    """The author of its present form, as `Actor.author` formats it."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)


class AliasGate(TenantOwned, Base):
    """What a version must pass before an alias moves to it. It stays if the alias is removed."""

    __tablename__ = "alias_gates"
    __table_args__ = (UniqueConstraint("tenant_id", "adapter_name", "alias"),)

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True, default=new_id)
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    alias: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    golden_set_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    tolerance: Mapped[float | None] = mapped_column(Float)
    """The loss of mean score that is no regression; None: that of the golden set."""
    created_by: Mapped[str] = mapped_column(String(AUTHOR_LENGTH))
    """The author of its present form, as `Actor.author` formats it."""
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)


class Evaluation(TenantOwned, Base):
    """A comparison of two versions, or of a version and the base, on a golden set. Its lease is
    the job lease `evaluation:` and its id."""

    __tablename__ = "evaluations"
    __table_args__ = (
        Index(
            "ix_evaluations_tenant_id_adapter_name_created_at_id",
            "tenant_id",
            "adapter_name",
            "created_at",
            "id",
        ),
        Index("ix_evaluations_state", "state"),
    )

    id: Mapped[str] = mapped_column(String(EVALUATION_ID_LENGTH), primary_key=True)
    adapter_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    golden_set_name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    file_id: Mapped[str] = mapped_column(String(FILE_ID_LENGTH))
    sha256: Mapped[str] = mapped_column(String(SHA256_HEX_LENGTH))
    """Of the set's file when the evaluation was created, like the next three."""
    num_cases: Mapped[int]
    tolerance: Mapped[float] = mapped_column(Float)
    judge: Mapped[str | None] = mapped_column(String(MAX_MODEL_LENGTH))
    base_name: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))
    """The base's model name."""
    version_number: Mapped[int]
    """The candidate."""
    version_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    against_number: Mapped[int | None]
    """The version that the candidate is compared with; None: the base."""
    against_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    key_id: Mapped[str] = mapped_column(String(KEY_ID_LENGTH))
    """Each of its requests is one of this key."""
    address: Mapped[str | None] = mapped_column(String(MAX_ADDRESS_LENGTH))
    """From which the key asks; None: a Unix socket."""
    state: Mapped[EvaluationState] = mapped_column(state_type(EvaluationState))
    batch_id: Mapped[str | None] = mapped_column(String(BATCH_ID_LENGTH))
    """The batch whose end it waits for."""
    batches: Mapped[dict[str, str]] = mapped_column(JSON)
    """The ids of all its batches, by what they ask for."""
    is_regression: Mapped[bool | None]
    """None: it has no report."""
    slices: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """The report: figures of each slice."""
    cases: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True), deferred=True)
    """The report: answers to the cases that differ most."""
    error_code: Mapped[str | None] = mapped_column(String(REASON_LENGTH))
    error_message: Mapped[str | None] = mapped_column(Text)
    created_by: Mapped[str] = mapped_column(String(AUTHOR_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
