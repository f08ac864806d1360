"""The table of shadows: versions that answer copies of an alias's requests."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    String,
)
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned, UtcDateTime
from ..keys.principal import AUTHOR_LENGTH
from ..names import MAX_NAME_LENGTH


class AliasShadow(TenantOwned, Base):
    """A version beside an alias, and the sums of the comparisons since the alias's last change."""

    __tablename__ = "alias_shadows"
    __table_args__ = (
        ForeignKeyConstraint(
            ["tenant_id", "adapter_id", "version_number"],
            [
                "adapter_versions.tenant_id",
                "adapter_versions.adapter_id",
                "adapter_versions.number",
            ],
            name="fk_alias_shadows_version_number_adapter_versions",
        ),
        CheckConstraint("percent > 0 AND percent <= 100", name="percent"),
    )

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    alias: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), primary_key=True)
    version_number: Mapped[int]
    percent: Mapped[float] = mapped_column(Float)
    """Of the requests that the alias's own version answers."""
    set_by: Mapped[str | None] = mapped_column(String(AUTHOR_LENGTH))
    change_number: Mapped[int]
    """The alias's last change: its own version since then is compared."""
    since: Mapped[datetime] = mapped_column(UtcDateTime)
    """When the sums began at zero."""
    num_compared: Mapped[int] = mapped_column(BigInteger, default=0)
    num_errors: Mapped[int] = mapped_column(BigInteger, default=0)
    """Requests that the shadow failed to answer; they are not compared."""
    num_equal: Mapped[int] = mapped_column(BigInteger, default=0)
    rouge_sum: Mapped[float] = mapped_column(Float, default=0.0)
    rouge_counts: Mapped[list[int]] = mapped_column(JSON)
    """By tenths of ROUGE-L; the last contains 1."""
    log_length_sum: Mapped[float] = mapped_column(Float, default=0.0)
    """Of the logarithms of the ratios of the lengths, the shadow's to the other's."""
