"""Reserves a request's maximum usage before it runs, and settles the actual usage at its end.

A request passes all limits, or is refused and pays for none. The number of tokens that it will
generate is unknown, so the maximum is reserved; the transaction that writes the ledger's row
returns the rest. Reserving and settling lock the tenant's quota, so they run one after another,
over all servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from ..base import utc_now
from ..sessions import PlatformSession, TenantRows
from . import repository
from .clock import Clock, read_clock
from .held import LEASE_SECONDS, Demand, Used, hold
from .models import Reservation
from .standing import Standing

KEPT_FOR = timedelta(days=1)
"""How long a server may be away before its reservations are dropped."""


def reserve(
    session: TenantRows, demand: Demand, *, server_id: str, clock: Clock = read_clock
) -> Standing:
    """Admit the request and record its reservation; returns the tenant's remaining amounts.

    Raises RateLimited, TooManyRequestsAtOnce or InsufficientQuota, with the remaining amounts.
    """
    with hold(session, clock=clock) as held:
        return held.reserve(demand, server_id)


def settle(
    session: TenantRows,
    request_id: str,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    at: datetime,
    clock: Clock = read_clock,
) -> None:
    """The request has ended with this usage; the unused amount is refunded.

    Call it once per ledger row, in its transaction and after it; `at` is the row's time, which
    selects the budget's period.
    """
    used = Used(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        at=at,
    )
    with hold(session, clock=clock) as held:
        held.settle([used])


def release(session: TenantRows, request_id: str, *, clock: Clock = read_clock) -> None:
    """The request never ran: everything is refunded. May be repeated."""
    with hold(session, clock=clock) as held:
        held.settle([Used(request_id=request_id)])


def renew(session: PlatformSession, server_id: str, *, clock: Clock = read_clock) -> int:
    """This server is alive, so its reservations continue to count; returns how many there are.

    Call it at least every third of `LEASE_SECONDS`.
    """
    now = clock(session)
    return repository.renew_reservations(session, server_id, now, now.seconds + LEASE_SECONDS)


def list_of_server(session: PlatformSession, server_id: str) -> Sequence[Reservation]:
    """The server's reservations for requests of all tenants, oldest first."""
    return repository.list_reservations_of_server(session, server_id)


def purge(session: PlatformSession, *, clock: Clock = read_clock) -> int:
    """Delete the reservations of servers that did not return; returns how many.

    They have not counted for a long time, and their buckets are full again. A server that returns
    later still records the usage of its requests.
    """
    return repository.purge_reservations(session, clock(session), utc_now() - KEPT_FOR)
