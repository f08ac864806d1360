"""Metering: a request's account, from admission to its row in the ledger.

A request's account is an entry in the token journal. It is allocated before the engine receives the
request and freed once the ledger has the row. So if a process dies, the journal has the cost of the
request, and the next server writes it to the ledger. An unavailable database is handled alike: an
answer ends once the journal has its outcome on disk, and the row follows later.

A complete answer is charged by its tokens. An interrupted answer is charged by the tokens that this
server received from the engine, which the journal counts. Once its streams are closed, nothing more
is counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import structlog

from ...engine.errors import Overloaded, TenantQueueFull
from ...engine.process.request_end import used_by
from ...engine.token_journal import MAX_OWNER_BYTES, Entry, SlotCounter, TokenJournal
from ...platform.base import utc_now
from ...platform.errors import DatabaseUnavailable
from ...platform.keys.principal import Principal
from ..control_plane.background_loop import BackgroundLoop
from ..control_plane.threads import WorkerThreads
from ..telemetry.metrics import Metrics
from .generation import Outcome
from .held_charge import HeldCharge
from .ledger_writer import AddResult, Charge, LedgerWriter, Owner
from .sequence_times import ABORTED
from .served_models import ServedModel
from .used import Used

log = structlog.get_logger(__name__)

RETRY_SECONDS = 0.5
END_SECONDS = 2.0
"""How long the charge of a request that was ended here, by a stop string or an abort, waits for the
engine to say what it has used. That is the end of the step that runs."""
CLOSE_SECONDS = 5.0
"""How long a stopping server waits for rows being written; the rest waits in the journal."""


@dataclass(eq=False, slots=True)
class Account:
    """The account of one request."""

    owner: Owner
    tenant_slug: str | None
    """For the metrics; None if an earlier process has admitted it."""
    slots: tuple[int, ...]
    """In the journal, one for each of its sequences."""
    counters: Sequence[SlotCounter] = ()
    """Of its sequences; none if an earlier process has admitted it."""
    held: HeldCharge | None = None
    """Where its charge waits for its result; None: it is charged when it ends."""


class Metering:
    """Opens and settles accounts; one for the server."""

    def __init__(
        self,
        *,
        journal: TokenJournal,
        ledger: LedgerWriter,
        metrics: Metrics,
    ) -> None:
        self._journal = journal
        self._ledger = ledger
        self._metrics = metrics
        self._threads = WorkerThreads("metering", 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_held: Counter[str] = Counter()
        """Slots of the journal, by tenant."""
        self._open: set[str] = set()
        """The ids of the requests with open accounts."""
        self._unsettled: dict[Account, Charge] = {}
        """Decided, but the database was away."""
        self._has_unsettled = asyncio.Event()
        self._retries = BackgroundLoop(self._retry)

    async def recover(self) -> None:
        """Settle the accounts of earlier processes, and from now on those that must be retried."""
        for entry in self._journal.take_left():
            await self._recover(entry)
        self._retries.start()

    async def close(self) -> None:
        """Wait for rows that are being written."""
        await self._retries.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        self._ledger.close()
        self._threads.close()

    @property
    def num_unsettled(self) -> int:
        """Requests that have ended and are not in the ledger yet."""
        return len(self._unsettled)

    def is_open(self, request_id: str) -> bool:
        """The request has an account, from before anything is reserved until it is settled."""
        return request_id in self._open

    def open(
        self,
        request_id: str,
        principal: Principal,
        model: ServedModel,
        *,
        counts_prompt: Sequence[bool],
        admitted_at: datetime | None = None,
        held: HeldCharge | None = None,
    ) -> Account:
        """An account for a request with as many sequences as `counts_prompt` has values, which tell
        whether a sequence accounts for its prompt. The prices of `admitted_at` are charged; None:
        of now.

        Raises DatabaseUnavailable if the journal is full because of a long outage, otherwise
        TenantQueueFull or Overloaded.
        """
        self._check_share(principal.tenant_id, len(counts_prompt))
        adapter, key, composition = model.adapter, model.key, model.composition
        owner = Owner(
            request_id,
            principal.tenant_id,
            principal.key_id,
            adapter.name if adapter else None,
            adapter.version if adapter else None,
            key.digest if key else None,
            held is not None,
            principal.user_id,
            admitted_at or utc_now(),
            composition.pinned if composition else None,
        )
        slots = self._journal.open(_encode(owner), counts_prompt)
        counters = [self._journal.counter(slot) for slot in slots]
        account = Account(owner, principal.tenant_slug, slots, counters, held)
        self._hold(account)
        if held is not None:
            held.account = account
        return account

    def discard(self, account: Account) -> None:
        """The request was refused: the engine has not received it, and nothing is reserved."""
        if account.held is not None:
            account.held.account = None
        self._free(account)

    async def commit(self, held: HeldCharge, add_result: AddResult) -> None:
        """Commit the result of an ended request together with its charge.

        Nothing is charged if `add_result` returns False. Raises a PlatformError; then the charge is
        still held.
        """
        account, charge = held.account, held.charge
        assert account is not None, "an account was opened"
        assert charge is not None, "the request has ended"
        if await self._ledger.write(account.owner, charge, add_result):
            self._observe(account, charge)
        held.account = None
        self._free(account)

    async def drop(self, held: HeldCharge) -> None:
        """Charge nothing for this attempt, and release what it has reserved."""
        account, held.account = held.account, None
        if account is None:
            return
        nothing = Charge(0, 0, 0, None, None, ABORTED, utc_now())
        try:
            await self._ledger.write(account.owner, nothing)
        except DatabaseUnavailable:  # a sweep releases it
            log.warning("attempt_not_released", request_id=account.owner.request_id)
        finally:
            self._free(account)

    async def settle(self, account: Account, outcome: Outcome) -> None:
        """Charge an ended request; once, and completely even if the caller is cancelled.

        Its streams are closed. Returns when the ledger has the row, or the disk has the outcome if
        the database is unavailable. An interrupted answer is charged in the background: its
        caller has gone. A held charge waits for its result.
        """
        if account.held is not None:
            account.held.charge = await self._charge_of(account, outcome)
            return
        work = self._settle_broken if outcome.finish_reason == ABORTED else self._settle_whole
        task = self._spawn(work(account, outcome))
        if outcome.finish_reason != ABORTED:
            await asyncio.shield(task)

    async def _settle_whole(self, account: Account, outcome: Outcome) -> None:
        await self._charge(account, await self._charge_of(account, outcome))

    async def _charge_of(self, account: Account, outcome: Outcome) -> Charge:
        used = Used.of(await used_by(outcome.ends, patience_seconds=END_SECONDS))
        if outcome.finish_reason == ABORTED:
            charge = self._counted(account.slots, tier=outcome.tier, load_ms=outcome.load_ms)
            return msgspec.structs.replace(charge, used=used)
        counts = outcome.counts
        return Charge(
            used=used,
            prompt_tokens=counts.num_prompt_tokens,
            cached_tokens=counts.num_cached_tokens,
            completion_tokens=counts.num_completion_tokens,
            tier=outcome.tier,
            load_ms=outcome.load_ms,
            finish_reason=outcome.finish_reason,
            ended_at=utc_now(),
        )

    async def _settle_broken(self, account: Account, outcome: Outcome) -> None:
        charge = await self._charge_of(account, outcome)
        try:
            await self._charge(account, charge)
        except Exception:  # a background task: there is no caller to report it to
            log.exception("usage_not_recorded", request_id=account.owner.request_id)

    def _counted(
        self, slots: Sequence[int], *, tier: str | None = None, load_ms: float | None = None
    ) -> Charge:
        """The charge of an interrupted answer: the journal's counts."""
        counts = self._journal.counts(slots)
        return Charge(
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            completion_tokens=counts.generated,
            tier=tier,
            load_ms=load_ms,
            finish_reason=ABORTED,
            ended_at=utc_now(),
        )

    async def _charge(self, account: Account, charge: Charge) -> None:
        """Decide the charge, and write it down where it lasts."""
        self._journal.close_request(account.slots, msgspec.msgpack.encode(charge))
        await self._write_down(account, charge)

    async def _write_down(self, account: Account, charge: Charge) -> None:
        """Write a decided charge to the database, else to the journal's disk until a retry."""
        try:
            await self._commit(account, charge)
        except DatabaseUnavailable:
            await self._threads.run(self._journal.sync, account.slots)
            self._unsettled[account] = charge
            self._has_unsettled.set()

    async def _commit(self, account: Account, charge: Charge) -> None:
        if await self._ledger.write(account.owner, charge):
            self._observe(account, charge)
        self._free(account)

    def _observe(self, account: Account, charge: Charge) -> None:
        if account.tenant_slug is not None:
            self._metrics.usage.observe(
                account.tenant_slug,
                prompt_tokens=charge.prompt_tokens,
                completion_tokens=charge.completion_tokens,
            )
            self._metrics.usage.observe_resources(
                account.tenant_slug,
                step_seconds=charge.used.step_seconds,
                kv_byte_seconds=charge.used.kv_byte_seconds,
                loaded_bytes=charge.used.loaded_bytes,
            )

    def _check_share(self, tenant_id: str, num_slots: int) -> None:
        """No tenant may hold more slots than remain free, so no tenant can fill the journal.

        Requests may have more sequences than are submitted to the engine at once, whose queue is
        bounded.
        """
        num_held = self._num_held[tenant_id]
        if num_held + num_slots <= self._journal.num_free - num_slots:
            return
        if self._unsettled:
            raise DatabaseUnavailable
        refusal = TenantQueueFull if num_held else Overloaded
        raise refusal(retry_after_seconds=RETRY_SECONDS)

    def _hold(self, account: Account) -> None:
        self._num_held[account.owner.tenant_id] += len(account.slots)
        self._open.add(account.owner.request_id)

    def _free(self, account: Account) -> None:
        self._journal.free(account.slots)
        self._open.discard(account.owner.request_id)
        self._num_held[account.owner.tenant_id] -= len(account.slots)
        self._num_held += Counter()  # drop tenants without slots

    async def _retry(self) -> None:
        while True:
            await self._has_unsettled.wait()
            await asyncio.sleep(RETRY_SECONDS)
            for account, charge in list(self._unsettled.items()):
                try:
                    await self._commit(account, charge)
                except DatabaseUnavailable:
                    break
                except Exception:
                    # It stays in the journal for the next server.
                    log.exception("usage_not_recorded", request_id=account.owner.request_id)
                del self._unsettled[account]
            if not self._unsettled:
                self._has_unsettled.clear()

    async def _recover(self, entry: Entry) -> None:
        try:
            account = Account(msgspec.msgpack.decode(entry.owner, type=Owner), None, entry.slots)
            self._hold(account)
            if account.owner.is_held:  # its line is answered again, or was charged
                self._free(account)
                return
            if entry.outcome is None:
                await self._charge(account, self._counted(entry.slots))
            else:
                charge = msgspec.msgpack.decode(entry.outcome, type=Charge)
                await self._write_down(account, charge)
        except Exception:
            # A row that cannot be written must not prevent the server from starting.
            log.exception("usage_not_recovered", slots=entry.slots)
            return
        log.info("usage_recovered", request_id=account.owner.request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _encode(owner: Owner) -> bytes:
    """The owner as the journal has it: a composition whose name is too long for a slot by its
    digest and the adapter named first only."""
    encoded = msgspec.msgpack.encode(owner)
    if len(encoded) <= MAX_OWNER_BYTES:
        return encoded
    return msgspec.msgpack.encode(msgspec.structs.replace(owner, composition=None))
