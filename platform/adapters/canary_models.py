"""The table of the sums of watched canaries."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, ForeignKey, String, text
from sqlalchemy.orm import Mapped, mapped_column

from ..base import ID_LENGTH, Base, TenantOwned
from ..names import MAX_NAME_LENGTH


class CanaryCounts(TenantOwned, Base):
    """The sums of one version since a change of its alias; removed at the next change."""

    __tablename__ = "canary_counts"

    tenant_id: Mapped[str] = mapped_column(
        String(ID_LENGTH), ForeignKey("tenants.id"), primary_key=True
    )
    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    alias: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), primary_key=True)
    change_number: Mapped[int] = mapped_column(primary_key=True)
    is_canary: Mapped[bool] = mapped_column(primary_key=True)
    num_requests: Mapped[int] = mapped_column(BigInteger)
    num_errors: Mapped[int] = mapped_column(BigInteger)
    num_answers: Mapped[int] = mapped_column(BigInteger)
    num_refusals: Mapped[int] = mapped_column(BigInteger)
    num_lengths: Mapped[int] = mapped_column(BigInteger)
    log_length_sum: Mapped[float] = mapped_column(Float)
    log_length_squares: Mapped[float] = mapped_column(Float)
    num_times: Mapped[int] = mapped_column(BigInteger)
    log_time_sum: Mapped[float] = mapped_column(Float)
    log_time_squares: Mapped[float] = mapped_column(Float)
    num_judged: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    score_sum: Mapped[float] = mapped_column(Float, server_default=text("0"))
    score_squares: Mapped[float] = mapped_column(Float, server_default=text("0"))
