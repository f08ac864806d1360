"""Leases on resident adapters: sets of request ids, not counters."""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from typing import Any, NamedTuple

from .identity import AdapterKey
from .record import Record


class Lease(NamedTuple):
    """A request's right to an adapter's place on the device, until it is released."""

    key: AdapterKey
    request_id: str
    row: int
    generation: int


class _Held(NamedTuple):
    lease: Lease
    record: Record[Any]


class Leases:
    """The leases of one engine, by request; a request holds at most one."""

    def __init__(self) -> None:
        self._by_request: dict[str, _Held] = {}
        self._elements: dict[str, int] = {}  # of the arena, by tenant
        self.num_reaped = 0
        """Leases that their requests did not release."""

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def keys(self) -> KeysView[str]:
        """The requests that hold a lease."""
        return self._by_request.keys()

    def get(self, request_id: str) -> Lease | None:
        held = self._by_request.get(request_id)
        return held.lease if held is not None else None

    def grant(self, record: Record[Any], request_id: str) -> Lease:
        """Lease a resident adapter to a request that holds no lease."""
        assert record.placement is not None
        lease = Lease(record.key, request_id, record.placement.row, record.placement.generation)
        self._by_request[request_id] = _Held(lease, record)
        if not record.leases:
            self._count(record, +1)
        record.leases.add(request_id)
        record.is_claimed = True
        return lease

    def end(self, request_id: str) -> Record[Any] | None:
        """End a request's lease; returns its adapter, or None if it holds none."""
        held = self._by_request.pop(request_id, None)
        if held is None:
            return None
        held.record.leases.remove(request_id)
        if not held.record.leases:
            self._count(held.record, -1)
        return held.record

    def strays(self, live: Iterable[str]) -> list[str]:
        """Requests that hold a lease and are not among `live`."""
        return sorted(self._by_request.keys() - set(live))

    def elements_of(self, tenant_id: str) -> int:
        """Elements of the arena under leases of this tenant's requests."""
        return self._elements.get(tenant_id, 0)

    @property
    def elements(self) -> int:
        """Elements of the arena under leases of all tenants' requests."""
        return sum(self._elements.values())

    def _count(self, record: Record[Any], sign: int) -> None:
        tenant_id = record.key.tenant_id
        leased = self._elements.get(tenant_id, 0) + sign * record.num_placed
        if leased:
            self._elements[tenant_id] = leased
        else:
            del self._elements[tenant_id]
