"""Batches admissions and ledger writes: those that wait while a transaction runs share the next.

Each caller gets its own result when the transaction commits. A commit costs as much for many
requests as for one, so a tenant's transactions are paced: the busier the tenant, the less each
request costs, and other tenants always have room. A single request does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, compress
from typing import Any, NamedTuple

import msgspec

from ...platform.errors import DatabaseUnavailable, LimitReached
from ...platform.prices.book import NO_TARIFF, Tariff
from ...platform.prices.cost_rates import NO_RATES, CostRates
from ...platform.prices.price import Price
from ...platform.quotas import service as quotas
from ...platform.quotas.service import Demand, HeldLimits, Standing
from ...platform.quotas.service import Used as Charged
from ...platform.sessions import TenantRows
from ...platform.usage import service as ledger
from ...platform.usage.service import Usage
from ..control_plane.control_plane import ControlPlane
from .pricing import Pricing
from .used import Used

MAX_REQUESTS = 64
"""The maximum per transaction: others wait for what it locks."""
PACE_SECONDS = 0.01
"""From the begin of a tenant's transaction to the next, unless that is full already."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """The ledger's data of a request before it has run; names are those of the catalog."""

    request_id: str
    tenant_id: str
    key_id: str | None
    adapter_name: str | None
    adapter_version: int | None
    adapter_digest: str | None
    is_held: bool = False
    """A line of a batch: charged with its result only; see `HeldCharge`."""
    user_id: str | None = None
    """Who called, or owns the key."""
    admitted_at: datetime | None = None
    """The prices of this time are charged; None: of the end, in journals of earlier releases."""
    composition: str | None = None
    """The pinned name of a composition; the adapter above is then the one named first."""


AddResult = Callable[[TenantRows], bool]
"""Adds the result of a request to the transaction; False if nothing is to be charged for it."""


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """The charge decided at the end of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tier: str | None
    load_ms: float | None
    finish_reason: str
    ended_at: datetime
    used: Used = Used()
    """Nothing in journals of earlier releases, and of requests that an engine was killed with."""

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to charge."""
        return not (self.prompt_tokens or self.completion_tokens)


class _Begun(NamedTuple):
    """A request that asks whether it may run."""

    demand: Demand
    server_id: str


class _Ended(NamedTuple):
    """A request that is to be charged."""

    owner: Owner
    charge: Charge
    add_result: AddResult | None


class _Entry(NamedTuple):
    work: _Begun | _Ended
    done: asyncio.Future[Any]
    """A Standing for a started request; for an ended one, whether its row is new."""


class _Done(NamedTuple):
    """What a transaction has done."""

    results: Sequence[object]
    """Of each of its works."""
    has_alerts: bool
    """Alerts of budgets were written."""


class LedgerWriter:
    """Writes for requests, of each tenant in one transaction at a time; one for the server."""

    def __init__(
        self,
        control_plane: ControlPlane,
        *,
        pricing: Pricing | None = None,
        rates: CostRates = NO_RATES,
        announce: Callable[[str], None] = lambda tenant_id: None,
    ) -> None:
        """`pricing`: None charges nothing. `rates`: what the engine costs. `announce` is called
        with a tenant that has alerts of budgets."""
        self._control_plane = control_plane
        self._pricing = pricing
        self._rates = rates
        self._announce = announce
        self._waiting: dict[str, list[_Entry]] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}

    async def tariff(self, tenant_id: str) -> Tariff:
        """The tenant's prices. Raises a PlatformError if they cannot be read."""
        return NO_TARIFF if self._pricing is None else await self._pricing.tariff(tenant_id)

    def reserve(self, tenant_id: str, demand: Demand, server_id: str) -> asyncio.Future[Standing]:
        """Completes when the reservation is made, with the remaining amounts; see `quotas.reserve`.

        It is executed even if the caller disconnects. Fails with a LimitReached or another
        PlatformError.
        """
        return self._add(tenant_id, _Begun(demand, server_id))

    async def write(
        self, owner: Owner, charge: Charge, add_result: AddResult | None = None
    ) -> bool:
        """Return once the row is committed; False if it already existed, or there is nothing to
        charge.

        `add_result` is called in the same transaction. Raises a PlatformError.
        """
        is_new: bool = await self._add(owner.tenant_id, _Ended(owner, charge, add_result))
        return is_new

    def close(self) -> None:
        """Abandon unwritten work; its callers are cancelled."""
        for task in self._writing.values():
            task.cancel()
        for entry in chain.from_iterable(self._waiting.values()):
            entry.done.cancel()
        self._waiting.clear()

    def _add(self, tenant_id: str, work: _Begun | _Ended) -> asyncio.Future[Any]:
        entry = _Entry(work, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant_id, []).append(entry)
        if tenant_id not in self._writing:
            self._writing[tenant_id] = asyncio.create_task(self._write_waiting(tenant_id))
        return entry.done

    async def _write_waiting(self, tenant_id: str) -> None:
        now = asyncio.get_running_loop().time
        try:
            while waiting := self._waiting.pop(tenant_id, None):
                next_at = now() + PACE_SECONDS
                if rest := waiting[MAX_REQUESTS:]:
                    self._waiting[tenant_id] = rest
                await self._commit_unless_closed(tenant_id, waiting[:MAX_REQUESTS])
                is_next_full = len(self._waiting.get(tenant_id, ())) >= MAX_REQUESTS
                if not is_next_full and (early := next_at - now()) > 0:
                    await asyncio.sleep(early)
        finally:
            del self._writing[tenant_id]

    async def _commit_unless_closed(self, tenant_id: str, entries: Sequence[_Entry]) -> None:
        try:
            await self._commit(tenant_id, entries)
        except asyncio.CancelledError:
            for entry in entries:
                entry.done.cancel()
            raise

    async def _commit(self, tenant_id: str, entries: Sequence[_Entry]) -> None:
        works = [entry.work for entry in entries]
        try:
            tariff = await self.tariff(tenant_id)
            done = await self._control_plane.write_plain(
                tenant_id, lambda session: _carry_out(session, works, tariff, self._rates)
            )
        except Exception as exc:  # every entry gets a result; one may have caused the error
            await self._note_failure(tenant_id, entries, exc)
            return
        for entry, result in zip(entries, done.results, strict=True):
            _tell(entry, result)
        if done.has_alerts:
            self._announce(tenant_id)

    async def _note_failure(
        self, tenant_id: str, entries: Sequence[_Entry], error: Exception
    ) -> None:
        """A row that cannot be written does not affect the others."""
        if len(entries) > 1 and not isinstance(error, DatabaseUnavailable):
            for entry in entries:
                await self._commit(tenant_id, [entry])
            return
        for entry in entries:
            _tell(entry, error)


def _tell(entry: _Entry, result: object) -> None:
    if entry.done.done():
        return
    if isinstance(result, Exception):
        entry.done.set_exception(result)
    else:
        entry.done.set_result(result)


def _carry_out(
    session: TenantRows, works: Sequence[_Begun | _Ended], tariff: Tariff, rates: CostRates
) -> _Done:
    """The result of each: ended requests are settled first, to make room for new ones."""
    ended = [work for work in works if isinstance(work, _Ended)]
    with quotas.hold(session) as held:
        are_new = iter(_record(session, ended, held, tariff, rates))
        results = [
            next(are_new) if isinstance(work, _Ended) else _reserve(held, work, tariff)
            for work in works
        ]
    return _Done(results, held.has_alerts)


def _reserve(held: HeldLimits, begun: _Begun, tariff: Tariff) -> Standing | LimitReached:
    """A refusal changes nothing, so the transaction of the others continues."""
    try:
        return held.reserve(_priced(begun.demand, tariff), begun.server_id)
    except LimitReached as exc:
        return exc


def _priced(demand: Demand, tariff: Tariff) -> Demand:
    """The demand with the most that it costs."""
    price = tariff.at(demand.admitted_at)
    if price is None:
        return demand
    most = price.most(
        prompt_tokens=demand.input_tokens,
        completion_tokens=demand.output_tokens,
        is_batch=demand.is_batch,
    )
    return replace(demand, amount=most)


def _record(
    session: TenantRows,
    ended: Sequence[_Ended],
    held: HeldLimits,
    tariff: Tariff,
    rates: CostRates,
) -> list[bool]:
    """Record the charges; False for a charge that is already recorded, is zero, or is not due."""
    are_due = [_is_due(session, each) for each in ended]
    usages = [_usage(each.owner, each.charge, tariff, rates) for each in compress(ended, are_due)]
    are_new = iter(ledger.record_all(session, usages, held))
    free = [each for each, is_due in zip(ended, are_due, strict=True) if not is_due]
    held.settle([Charged(request_id=each.owner.request_id) for each in free])
    return [is_due and next(are_new) for is_due in are_due]


def _is_due(session: TenantRows, ended: _Ended) -> bool:
    """Whether there is something to charge; adds the request's result, if it has one."""
    is_first = ended.add_result is None or ended.add_result(session)
    return is_first and not ended.charge.is_nothing


def _usage(owner: Owner, charge: Charge, tariff: Tariff, rates: CostRates) -> Usage:
    used = charge.used
    price = tariff.at(owner.admitted_at or charge.ended_at)
    return Usage(
        request_id=owner.request_id,
        adapter_name=owner.adapter_name,
        adapter_version=owner.adapter_version,
        adapter_digest=owner.adapter_digest,
        composition=owner.composition,
        prompt_tokens=charge.prompt_tokens,
        cached_tokens=charge.cached_tokens,
        completion_tokens=charge.completion_tokens,
        tier=charge.tier,
        finish_reason=charge.finish_reason,
        key_id=owner.key_id,
        load_ms=charge.load_ms,
        user_id=owner.user_id,
        price_id=None if price is None else price.id,
        amount=0 if price is None else _amount(owner, charge, price),
        step_nanoseconds=used.step_nanoseconds,
        kv_byte_seconds=used.kv_byte_seconds,
        loaded_bytes=used.loaded_bytes,
        fetched_bytes=used.fetched_bytes,
        cost=rates.cost(
            step_nanoseconds=used.step_nanoseconds,
            kv_byte_seconds=used.kv_byte_seconds,
            loaded_bytes=used.loaded_bytes,
        ),
        ended_at=charge.ended_at.astimezone(UTC),
    )


def _amount(owner: Owner, charge: Charge, price: Price) -> int:
    return price.amount(
        prompt_tokens=charge.prompt_tokens,
        cached_tokens=charge.cached_tokens,
        completion_tokens=charge.completion_tokens,
        is_batch=owner.is_held,
    )
