"""Requests that wait for something else than their turn, such as their grammar. Torch-free."""

from __future__ import annotations

from collections import Counter

from ..request import Request


class HeldRequests:
    """No step may take them; they count as waiting."""

    def __init__(self) -> None:
        self._requests: set[Request] = set()
        self._num_of: Counter[str] = Counter()
        """By tenant, without background requests; only those that have one."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def num_queued(self) -> int:
        """Of all tenants, without background requests."""
        return self._num_of.total()

    def num_of(self, tenant_id: str) -> int:
        """Without background requests."""
        return self._num_of[tenant_id]

    def add(self, request: Request) -> None:
        self._requests.add(request)
        if not request.is_background:
            self._num_of[request.tenant_id] += 1

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        if request.is_background:
            return
        self._num_of[request.tenant_id] -= 1
        if not self._num_of[request.tenant_id]:
            del self._num_of[request.tenant_id]
