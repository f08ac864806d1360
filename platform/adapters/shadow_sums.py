"""The comparisons of a shadow with the alias's own version."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select

from ..base import utc_now
from ..sessions import TenantSession
from .canary_sums import Split
from .history import AliasChange
from .shadow_models import AliasShadow

NUM_TENTHS = 10


class Compared(NamedTuple):
    """Two answers to one request."""

    is_equal: bool
    rouge: float
    """ROUGE-L, from 0 to 1."""
    log_length_ratio: float
    """The logarithm of the shadow's output tokens to the other's."""


def find(session: TenantSession, adapter_id: str, alias: str) -> AliasShadow | None:
    """The alias's shadow."""
    query = select(AliasShadow).where(
        AliasShadow.adapter_id == adapter_id, AliasShadow.alias == alias
    )
    return session.scalars(query).one_or_none()


def begin(row: AliasShadow, change_number: int) -> None:
    """Start the sums at zero; from now on answers since this change of the alias are compared."""
    row.change_number = change_number
    row.since = utc_now()
    row.num_compared = row.num_errors = row.num_equal = 0
    row.rouge_sum = row.log_length_sum = 0.0
    row.rouge_counts = [0] * NUM_TENTHS


def follow(session: TenantSession, change: AliasChange) -> None:
    """Let the alias's shadow follow a change: it ends with the alias, and when it is released."""
    row = find(session, change.adapter_id, change.alias)
    if row is None:
        return
    if change.version_number in (None, row.version_number):
        session.delete(row)
    else:
        begin(row, change.number)
    session.flush()


def add(
    session: TenantSession, split: Split, version_number: int, compared: Compared | None
) -> None:
    """Add two answers, or that the shadow failed; nothing if alias or shadow have changed since."""
    query = select(AliasShadow).where(
        AliasShadow.adapter_id == split.adapter_id,
        AliasShadow.alias == split.alias,
        AliasShadow.change_number == split.change_number,
        AliasShadow.version_number == version_number,
    )
    row = session.scalars(query.with_for_update()).one_or_none()
    if row is None:
        return
    if compared is None:
        row.num_errors += 1
        return
    row.num_compared += 1
    row.num_equal += compared.is_equal
    row.rouge_sum += compared.rouge
    row.log_length_sum += compared.log_length_ratio
    tenth = min(int(compared.rouge * NUM_TENTHS), NUM_TENTHS - 1)
    counts = list(row.rouge_counts)
    counts[tenth] += 1
    row.rouge_counts = counts
