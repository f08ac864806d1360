"""The replicas of a fleet, and the leases under which their agents serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from ..base import JsonObject, new_id
from ..errors import InvalidValue, ReplicaNotFound
from ..jobs.service import shared_now
from ..sessions import PlatformSession
from .address import parse_address
from .models import Replica

REMOVED = "replica_removed"
"""The table has no such replica any more."""
FENCED = "replica_fenced"
"""The lease of this life of the agent has ended."""
REPLACED = "replica_replaced"
"""A later agent has the address."""
INCOMPATIBLE = "replica_incompatible"
"""The fleet serves another base, quantization or dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """An agent's question for its lease."""

    id: str
    incarnation: str
    """Later ones are greater as strings."""
    base_id: str
    runtime_id: str
    state: str
    figures: JsonObject


def add(session: PlatformSession, address: str, *, replica_id: str | None = None) -> Replica:
    """The replica with this address, which is added if it is not there, with this ID or a new one.
    Raises InvalidValue."""
    _check_address(address)
    known = select(Replica).where(Replica.address == address)
    found = session.scalars(known).one_or_none()
    if found is not None:
        return found
    added = Replica(
        id=replica_id or new_id(),
        address=address,
        is_draining=False,
        added_at=shared_now(session),
    )
    try:
        with session.begin_nested():
            session.add(added)
    except IntegrityError:  # another server has just added it
        return session.scalars(known).one()
    return added


def move(session: PlatformSession, replica_id: str, address: str) -> Replica:
    """Its agent listens at another address now. It keeps its ID, and so its place in every
    adapter's order. Raises ReplicaNotFound, or InvalidValue if the address is another replica's."""
    _check_address(address)
    row = _lock(session, replica_id)
    try:
        with session.begin_nested():
            row.address = address
    except IntegrityError as exc:
        raise InvalidValue(f"{address} is another replica's address.", param="address") from exc
    return row


def remove(session: PlatformSession, replica_id: str) -> Replica:
    """Remove the replica: its agent's lease ends, and no deletion waits for it. Raises
    ReplicaNotFound."""
    row = _lock(session, replica_id)
    session.delete(row)
    return row


def set_draining(session: PlatformSession, replica_id: str, is_draining: bool) -> Replica:
    """Whether API servers send it no further requests. Raises ReplicaNotFound."""
    row = _lock(session, replica_id)
    row.is_draining = is_draining
    return row


def list_replicas(session: PlatformSession) -> Sequence[Replica]:
    """All replicas, in the order in which they were added."""
    return session.scalars(select(Replica).order_by(Replica.added_at, Replica.id)).all()


def renew(
    session: PlatformSession, renewals: Sequence[Renewal], *, lease_seconds: float
) -> Mapping[str, str | None]:
    """Write that these agents live. By replica: None if it was written, or why the agent must not
    serve, one of the codes above."""
    # All rows, in one order: a fleet's first two agents could otherwise join with different bases.
    locked = select(Replica).order_by(Replica.id).with_for_update()
    rows = {row.id: row for row in session.scalars(locked)}
    now, answers = shared_now(session), dict[str, str | None]()
    for renewal in renewals:
        row = rows.get(renewal.id)
        answers[renewal.id] = objection = _objection(rows, renewal, now, lease_seconds)
        if row is not None and objection is None:
            row.incarnation, row.state = renewal.incarnation, renewal.state
            row.base_id, row.runtime_id = renewal.base_id, renewal.runtime_id
            row.figures, row.seen_at = renewal.figures, now
    return answers


def is_live(row: Replica, now: datetime, seconds: float) -> bool:
    """Whether its lease was renewed within this time."""
    return row.seen_at is not None and now - row.seen_at < timedelta(seconds=seconds)


def has_expired(row: Replica, now: datetime, lease_seconds: float) -> bool:
    """Whether its agent's lease has ended, or there never was one."""
    return not is_live(row, now, lease_seconds)


def _objection(
    rows: Mapping[str, Replica], renewal: Renewal, now: datetime, lease_seconds: float
) -> str | None:
    row = rows.get(renewal.id)
    if row is None:
        return REMOVED
    if has_expired(row, now, lease_seconds):
        # A machine's clock may have been set back, so another life need not be a later one.
        if row.incarnation == renewal.incarnation:
            return FENCED
    elif row.incarnation is not None and row.incarnation > renewal.incarnation:
        return REPLACED
    others = (other for other in rows.values() if other is not row)
    live = [other for other in others if not has_expired(other, now, lease_seconds)]
    first = min(live, key=lambda other: (other.added_at, other.id), default=None)
    if first is not None and first.runtime_id != renewal.runtime_id:
        return INCOMPATIBLE
    return None


def _check_address(address: str) -> None:
    try:
        parse_address(address)
    except ValueError as exc:
        raise InvalidValue(f"{address!r}: {exc}.", param="address") from exc


def _lock(session: PlatformSession, replica_id: str) -> Replica:
    row = session.get(Replica, replica_id, with_for_update=True)
    if row is None:
        raise ReplicaNotFound
    return row
