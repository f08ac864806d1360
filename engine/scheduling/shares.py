"""What each tenant is entitled to, by weight among those that have requests. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Request


@dataclass(slots=True)
class _Member:
    weight: float
    num_requests: int = 0


class Shares:
    """Counts each tenant's requests, be they waiting or running."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._total = 0.0

    def enter(self, request: Request) -> None:
        member = self._members.get(request.tenant_id)
        if member is None:
            member = self._members[request.tenant_id] = _Member(request.tenant_weight)
            self._total += member.weight
        member.num_requests += 1

    def leave(self, request: Request) -> None:
        member = self._members[request.tenant_id]
        member.num_requests -= 1
        if not member.num_requests:
            del self._members[request.tenant_id]
            self._total = sum(other.weight for other in self._members.values())

    def of(self, tenant_id: str) -> float:
        """The part of everything that is the tenant's while all of them want it."""
        return self._members[tenant_id].weight / self._total
