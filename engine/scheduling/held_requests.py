"""Requests that wait for something else than their turn, such as their grammar. Torch-free."""

from __future__ import annotations

from collections import Counter

from ..request import Request


class HeldRequests:
    """No step may take them; they count as waiting."""

    def __init__(self) -> None:
        self._requests: dict[Request, int] = {}
        """With the number of things that each waits for."""
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

    @property
    def num_background(self) -> int:
        return len(self._requests) - self.num_queued

    def num_of(self, tenant_id: str) -> int:
        """Without background requests."""
        return self._num_of[tenant_id]

    def add(self, request: Request, num_awaited: int = 1) -> None:
        self._requests[request] = num_awaited
        if not request.is_background:
            self._num_of[request.tenant_id] += 1

    def arrive(self, request: Request) -> bool:
        """One of the things is there; whether it was the last, and the request is held no more."""
        self._requests[request] -= 1
        if self._requests[request]:
            return False
        self.remove(request)
        return True

    def remove(self, request: Request) -> None:
        del self._requests[request]
        if request.is_background:
            return
        self._num_of[request.tenant_id] -= 1
        if not self._num_of[request.tenant_id]:
            del self._num_of[request.tenant_id]
