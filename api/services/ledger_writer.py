"""Writing what ended into the ledger: what waits while a transaction runs goes into the next one.

Everybody learns of their row when it is committed. A commit costs as much for many rows as for one,
so the busier a tenant is, the less a request costs; one alone waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import NamedTuple

import msgspec

from ...platform.errors import DatabaseUnavailable
from ...platform.quotas import service as quotas
from ...platform.sessions import TenantSession
from ...platform.usage import service as ledger
from ...platform.usage.service import Usage
from ..control_plane import ControlPlane

MAX_ROWS = 64
"""Of one transaction: what it locks, others wait for."""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """What the ledger says of a request before it has run; the names are the catalog's."""

    request_id: str
    tenant_id: str
    key_id: str | None
    adapter_name: str | None
    adapter_version: int | None
    adapter_digest: str | None


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """What was decided when the request ended."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tier: str | None
    load_ms: float | None
    finish_reason: str
    ended_at: datetime


class _Entry(NamedTuple):
    owner: Owner
    charge: Charge
    is_new: asyncio.Future[bool]


class LedgerWriter:
    """Writes rows, of each tenant in one transaction at a time; one for the server."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane
        self._waiting: dict[str, list[_Entry]] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}

    async def write(self, owner: Owner, charge: Charge) -> bool:
        """Return once the row is committed; False if it was there, or there is nothing to charge.

        Raises a PlatformError.
        """
        entry = _Entry(owner, charge, asyncio.get_running_loop().create_future())
        tenant_id = owner.tenant_id
        self._waiting.setdefault(tenant_id, []).append(entry)
        if tenant_id not in self._writing:
            self._writing[tenant_id] = asyncio.create_task(self._write_waiting(tenant_id))
        return await entry.is_new

    def close(self) -> None:
        """Give up what is not written yet; who waits for it is cancelled."""
        for task in self._writing.values():
            task.cancel()
        for entry in chain.from_iterable(self._waiting.values()):
            entry.is_new.cancel()
        self._waiting.clear()

    async def _write_waiting(self, tenant_id: str) -> None:
        try:
            while waiting := self._waiting.pop(tenant_id, None):
                if rest := waiting[MAX_ROWS:]:
                    self._waiting[tenant_id] = rest
                await self._commit(tenant_id, waiting[:MAX_ROWS])
        finally:
            del self._writing[tenant_id]

    async def _commit(self, tenant_id: str, entries: Sequence[_Entry]) -> None:
        try:
            are_new = await self._control_plane.write(
                tenant_id, lambda session: _record(session, entries)
            )
        except asyncio.CancelledError:
            for entry in entries:
                entry.is_new.cancel()
            raise
        except Exception as exc:
            await self._note_failure(tenant_id, entries, exc)
            return
        for entry, is_new in zip(entries, are_new, strict=True):
            if not entry.is_new.done():
                entry.is_new.set_result(is_new)

    async def _note_failure(
        self, tenant_id: str, entries: Sequence[_Entry], error: Exception
    ) -> None:
        """One row that cannot be written keeps no other from being so."""
        if len(entries) > 1 and not isinstance(error, DatabaseUnavailable):
            for entry in entries:
                await self._commit(tenant_id, [entry])
            return
        for entry in entries:
            if not entry.is_new.done():
                entry.is_new.set_exception(error)


def _record(session: TenantSession, entries: Sequence[_Entry]) -> list[bool]:
    """Record what is to be charged; False for what is recorded already, or costs nothing."""
    charged = []
    for entry in entries:
        if entry.charge.prompt_tokens or entry.charge.completion_tokens:
            charged.append(entry)
        else:
            quotas.release(session, entry.owner.request_id)
    usages = [_usage(entry.owner, entry.charge) for entry in charged]
    are_new = dict(zip(charged, ledger.record_all(session, usages), strict=True))
    return [are_new.get(entry, False) for entry in entries]


def _usage(owner: Owner, charge: Charge) -> Usage:
    return Usage(
        request_id=owner.request_id,
        adapter_name=owner.adapter_name,
        adapter_version=owner.adapter_version,
        adapter_digest=owner.adapter_digest,
        prompt_tokens=charge.prompt_tokens,
        cached_tokens=charge.cached_tokens,
        completion_tokens=charge.completion_tokens,
        tier=charge.tier,
        finish_reason=charge.finish_reason,
        key_id=owner.key_id,
        load_ms=charge.load_ms,
        ended_at=charge.ended_at.astimezone(UTC),
    )
