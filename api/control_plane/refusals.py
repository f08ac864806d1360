"""Logs refused calls: counted in memory, written to the audit log every minute.

A refused call changes nothing, so its entry has no transaction to share, and a flood of calls must
not fill the log. One party's refusals with one code at one route are one entry per minute with a
count. Beyond a number of parties per chain, the rest share one entry.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from ...platform.audit.event import Event, Origin, Party
from ...platform.errors import DatabaseUnavailable
from ...platform.keys.principal import SYSTEM, AnyPrincipal, Principal
from .control_plane import ControlPlane
from .periodic import Periodic

log = structlog.get_logger(__name__)

WRITE_SECONDS = 60.0
MAX_ENTRIES = 20
"""Per chain of the log and interval, in addition to the shared entry of all others."""
OTHERS = "others"
REFUSALS = frozenset(
    {
        "insufficient_scope",
        "address_not_allowed",
        "tenant_suspended",
        "grant_too_wide",
        "own_account",
        "session_required",
        "invalid_api_key",
        "sign_in_failed",
        "sign_in_locked",
        "sign_in_rejected",
    }
)
"""The codes about permissions: not limits, states or missing resources."""


class _Refused(NamedTuple):
    party: Party
    code: str
    resource: str


@dataclass(slots=True)
class _Seen:
    """The count of one refusal, and its first time."""

    request_id: str
    address: str | None
    times: int = 0


class Refusals:
    """One per server."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane
        self._seen: dict[_Refused, _Seen] = {}
        self._num_entries: Counter[str | None] = Counter()
        self._writes = Periodic(
            self.write, seconds=WRITE_SECONDS, log=log, failed="refusals_not_written"
        )

    def start(self) -> None:
        self._writes.start()

    async def close(self) -> None:
        """Write the pending entries."""
        await self._writes.close()
        await self.write()

    def add(
        self, party: Party, *, code: str, resource: str, request_id: str, address: str | None
    ) -> None:
        """Count a refusal. `resource` is the refused route."""
        self._count(_Refused(party, code, resource), _Seen(request_id, address), 1)

    async def write(self) -> None:
        """Write the collected entries; they are kept while the database is unavailable."""
        seen, self._seen = self._seen, {}
        self._num_entries.clear()
        try:
            while seen:
                await self._write_one(seen)
        except DatabaseUnavailable:
            log.warning("refusals_not_written", num_entries=len(seen))
        finally:  # also for a caller that closes this while it writes
            for refused, first in seen.items():
                self._count(refused, first, first.times)

    async def _write_one(self, seen: dict[_Refused, _Seen]) -> None:
        """Write one entry; it is put back if the database is unavailable."""
        refused, first = seen.popitem()
        try:
            await self._write_entry(refused, first)
        except DatabaseUnavailable:
            seen[refused] = first
            raise
        except Exception:  # a defect in one entry must not stop the others
            log.exception("refusal_not_written", code=refused.code)

    async def _write_entry(self, refused: _Refused, seen: _Seen) -> None:
        party, code, resource = refused
        # Without a request id: an entry with a request id means that the request was executed.
        details = {"code": code, "times": seen.times, "first_request": seen.request_id}
        await self._control_plane.note(
            party.tenant_id,
            Origin(party.actor, address=seen.address),
            Event("access.refuse", resource, details),
        )

    def _count(self, refused: _Refused, first: _Seen, times: int) -> None:
        chain = refused.party.tenant_id
        if refused not in self._seen and self._num_entries[chain] >= MAX_ENTRIES:
            refused = _Refused(Party(chain, SYSTEM), OTHERS, OTHERS)
        seen = self._seen.get(refused)
        if seen is None:
            seen = self._seen[refused] = _Seen(first.request_id, first.address)
            self._num_entries[chain] += 1
        seen.times += times


def party_of(caller: AnyPrincipal) -> Party:
    """The party of the caller: an operator is logged in the platform's chain, in whichever tenant
    it acts."""
    if isinstance(caller, Principal) and caller.operator_role is None:
        return Party(caller.tenant_id, caller.actor)
    return Party(None, caller.actor)
