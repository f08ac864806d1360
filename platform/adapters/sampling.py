"""The opt-in to keep samples of an adapter's requests, and the choice of the requests.

Every request has a value in [0, 100) that depends only on the adapter and the request's id. Those
whose value is below the share are sampled.
"""

from __future__ import annotations

import hashlib
import math

from sqlalchemy import select

from ..base import utc_now
from ..errors import InvalidValue, SamplingForbidden
from ..sessions import TenantSession
from .lookup import get_bare_adapter, lock_catalog
from .models import AdapterSampling

_PERSON = b"loraplex sample"
_PLACE_BITS = 53
"""The precision of a float, so that the value never rounds up to 100."""


def is_sampled(percent: float, *, adapter_id: str, request_id: str) -> bool:
    """Whether a sample of this request is kept, of this share of the adapter's requests."""
    key = f"{adapter_id}/{request_id}".encode()  # neither id has a slash
    digest = hashlib.blake2b(key, digest_size=8, person=_PERSON).digest()
    bits = int.from_bytes(digest, "little") >> (64 - _PLACE_BITS)
    return 100.0 * math.ldexp(bits, -_PLACE_BITS) < percent


def find_sampling(session: TenantSession, name: str) -> AdapterSampling | None:
    """The adapter's opt-in; None: nothing is kept. Raises AdapterNotFound."""
    return _find(session, get_bare_adapter(session, name).id)


def sampled_percent(session: TenantSession, adapter_id: str) -> float:
    """The share of the adapter's requests of which samples are kept."""
    query = select(AdapterSampling.percent).where(AdapterSampling.adapter_id == adapter_id)
    return session.scalars(query).one_or_none() or 0.0


def set_sampling(
    session: TenantSession, name: str, *, percent: float, days: int, max_days: int, changed_by: str
) -> AdapterSampling:
    """Keep samples of this share of the adapter's requests, in percent, for so many days.

    `max_days`: the operator's maximum. Raises AdapterNotFound, InvalidValue, or SamplingForbidden
    if the operator allows none.
    """
    if max_days == 0:
        raise SamplingForbidden
    if not 1 <= days <= max_days:
        raise InvalidValue(f"Samples are kept for 1 to {max_days} days.", param="days")
    if not (math.isfinite(percent) and 0 < percent <= 100):
        raise InvalidValue("The share must be above 0 and at most 100.", param="percent")
    lock_catalog(session)
    adapter, now = get_bare_adapter(session, name), utc_now()
    row = _find(session, adapter.id)
    if row is None:
        row = AdapterSampling(adapter_id=adapter.id, since=now)
        session.add(row)
    row.percent, row.days, row.changed_at, row.changed_by = percent, days, now, changed_by
    session.flush()
    return row


def stop_sampling(session: TenantSession, name: str) -> bool:
    """Keep no more samples; False if none were kept. Those that exist stay.

    Raises AdapterNotFound.
    """
    lock_catalog(session)
    return forget_sampling(session, get_bare_adapter(session, name).id)


def forget_sampling(session: TenantSession, adapter_id: str) -> bool:
    """Remove the adapter's opt-in; False if there is none."""
    row = _find(session, adapter_id)
    if row is not None:
        session.delete(row)
        session.flush()
    return row is not None


def _find(session: TenantSession, adapter_id: str) -> AdapterSampling | None:
    query = select(AdapterSampling).where(AdapterSampling.adapter_id == adapter_id)
    return session.scalars(query.execution_options(populate_existing=True)).one_or_none()
