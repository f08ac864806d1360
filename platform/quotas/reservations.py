"""Reserving what a request may use before it runs, and settling what it used when it has ended.

A request passes every limit, or is refused and pays for none. How much it will generate is not
known, so the most is reserved; the rest is given back in the transaction that writes the ledger's
row. Whoever reserves or settles holds the tenant's quota: one after another, on all servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ..adapters.registry import AdapterRef
from ..errors import InsufficientQuota, RateLimited, TooManyRequestsAtOnce
from ..sessions import PlatformSession, TenantSession
from . import repository
from .bucket import Reading
from .clock import Clock, moment_of, read_clock
from .limits import NO_LIMITS, Limits, limits_of
from .models import PeriodUse, RateKind, Reservation
from .period import begin_of
from .rates import Costs, Rates
from .standing import Standing

LEASE_SECONDS = 60.0
"""So long after its server was last heard of a reservation counts against limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may use."""

    request_id: str
    key_id: str | None
    adapter: AdapterRef | None
    """None is the base model."""
    input_tokens: int
    output_tokens: int
    """The most that it may generate, all its choices together."""


def reserve(
    session: TenantSession, demand: Demand, *, server_id: str, clock: Clock = read_clock
) -> Standing:
    """Let the request pass and write down what it may use; what the tenant has left then.

    Raises RateLimited, TooManyRequestsAtOnce or InsufficientQuota, with what is left.
    """
    limits = limits_of(repository.lock_quota(session))
    now = clock(session)
    rates = Rates(session, limits, now)
    _check_running(session, limits, demand, rates, now)
    costs = rates.costs(input_tokens=demand.input_tokens, output_tokens=demand.output_tokens)
    rates.check(costs)
    rates.pay(costs)
    session.add(_reservation(demand, costs, server_id, now))
    session.flush()
    return rates.standing


def settle(
    session: TenantSession,
    request_id: str,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    at: datetime,
    clock: Clock = read_clock,
) -> None:
    """The request has ended and used this: what it did not use is given back.

    To be called once for each row of the ledger, in its transaction and behind it; `at`
    is the row's time, which says the budget of which period pays.
    """
    limits = _remove(session, request_id, prompt_tokens, completion_tokens, clock)
    if limits.tokens_per_period is not None:
        begin = begin_of(limits.period, at)
        use = repository.find_period_use(session, limits.period, begin)
        if use is None:
            use = PeriodUse(period=limits.period, begins_at=begin, tokens=0)
            session.add(use)
        use.tokens += prompt_tokens + completion_tokens
    session.flush()


def release(session: TenantSession, request_id: str, *, clock: Clock = read_clock) -> None:
    """The request never ran: all its tokens are given back. May be repeated."""
    _remove(session, request_id, 0, 0, clock)
    session.flush()


def renew(session: PlatformSession, server_id: str, *, clock: Clock = read_clock) -> int:
    """This server lives, so its reservations go on counting; how many they are.

    To be called at least every third of `LEASE_SECONDS`.
    """
    now = clock(session)
    return repository.renew_reservations(session, server_id, now, now.seconds + LEASE_SECONDS)


def list_of_server(session: PlatformSession, server_id: str) -> Sequence[Reservation]:
    """What the server has reserved for requests of all tenants, the oldest first."""
    return repository.list_reservations_of_server(session, server_id)


def _check_running(
    session: TenantSession, limits: Limits, demand: Demand, rates: Rates, now: Reading
) -> None:
    """What the tenant's running requests leave is enough. Raises a LimitReached."""
    if limits.concurrent_requests is None and limits.tokens_per_period is None:
        return
    running = repository.sum_reservations(session, now)
    if limits.tokens_per_period is not None:
        _check_budget(session, limits, demand, rates, running.tokens, now)
    most = limits.concurrent_requests
    if most is not None and running.num_requests >= most:
        raise TooManyRequestsAtOnce(
            f"The limit is {most} requests at once, and {running.num_requests} run.",
            standing=rates.standing,
        )


def _check_budget(
    session: TenantSession,
    limits: Limits,
    demand: Demand,
    rates: Rates,
    num_reserved: int,
    now: Reading,
) -> None:
    """The period's budget has room for the most that the request may use. Raises a LimitReached."""
    budget, period = limits.tokens_per_period, limits.period
    assert budget is not None
    use = repository.find_period_use(session, period, begin_of(period, moment_of(now)))
    left = budget - (0 if use is None else use.tokens)
    cost = demand.input_tokens + demand.output_tokens
    needed = min(cost, budget)
    if left - num_reserved >= needed:
        return
    says = f"The limit is {budget} tokens a {period}: {left} are left"
    if left >= needed:
        raise RateLimited(
            f"{says}, of which running requests may use {num_reserved}, and this may use {cost}.",
            standing=rates.standing,
        )
    raise InsufficientQuota(
        f"{says}, and this may use {cost}; `max_tokens` says how many at most.",
        standing=rates.standing,
    )


def _reservation(demand: Demand, costs: Costs, server_id: str, now: Reading) -> Reservation:
    adapter = demand.adapter
    return Reservation(
        request_id=demand.request_id,
        server_id=server_id,
        key_id=demand.key_id,
        adapter_name=adapter and adapter.name,
        adapter_version=adapter and adapter.version,
        adapter_digest=adapter and adapter.key.digest,
        input_tokens=demand.input_tokens,
        output_tokens=demand.output_tokens,
        paid_input_tokens=costs.get(RateKind.INPUT_TOKENS, 0),
        paid_output_tokens=costs.get(RateKind.OUTPUT_TOKENS, 0),
        clock=now.clock,
        expires_at=now.seconds + LEASE_SECONDS,
    )


def _remove(
    session: TenantSession, request_id: str, input_tokens: int, output_tokens: int, clock: Clock
) -> Limits:
    """Remove the reservation, if it is there; its buckets pay what was used, and no more.

    Returns the limits, held if they are on requests.
    """
    if not repository.concerns_limits(session, request_id):
        return NO_LIMITS
    quota, reservation = repository.find_quota_and_reservation(session, request_id)
    limits = limits_of(quota)
    if limits.restrict_requests:
        limits = limits_of(repository.lock_quota(session))
        # Only now is it sure that nobody else is giving back the same.
        _, reservation = repository.find_quota_and_reservation(session, request_id)
    if reservation is not None:
        Rates(session, limits, clock(session)).pay(
            {
                RateKind.INPUT_TOKENS: input_tokens - reservation.paid_input_tokens,
                RateKind.OUTPUT_TOKENS: output_tokens - reservation.paid_output_tokens,
            }
        )
        session.delete(reservation)
    return limits
