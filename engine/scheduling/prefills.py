"""In which order a step continues the prompts of running requests. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..request import Request
from .fairness import VirtualTokenCounters


class Prefills:
    """Running requests with a prompt to compute, by their tenants' service; each comes once."""

    def __init__(self, requests: Iterable[Request], counters: VirtualTokenCounters[str]) -> None:
        self._counter = counters.counter
        self._requests = deque(
            sorted(requests, key=lambda request: self._counter(request.tenant_id))
        )

    def left(self) -> tuple[Request, ...]:
        """Those that have not come yet."""
        return tuple(self._requests)

    def before(self, candidate: Request) -> Iterator[Request]:
        """Those that go on before the candidate is admitted: its tenant's, and those of tenants
        that had less service. Each is charged before the next one is asked for."""
        tenant_id = candidate.tenant_id
        while self._requests:
            next_tenant = self._requests[0].tenant_id
            if next_tenant != tenant_id and self._counter(next_tenant) >= self._counter(tenant_id):
                return
            yield self._requests.popleft()

    def rest(self) -> Iterator[Request]:
        while self._requests:
            yield self._requests.popleft()
