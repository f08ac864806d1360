"""The running requests, and what those of each tenant hold. Torch-free.

A tenant's *holding* of a resource is the part of it that its running requests have, divided by the
tenant's weight. Who holds most gives way first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..kv.blocks import KvBlocks
from ..request import Request
from .shares import Shares

MAX_PREEMPTIONS = 3
"""After so many, a tenant's last running request is left alone while there are other victims: who
is over its share with a single long request still gets to its end."""

ROUNDING = 1e-9
"""Shares are sums of quotients; what is equal but for rounding is equal."""

Measure = Callable[[str], float]
"""The part of a resource that a tenant has."""


@dataclass(slots=True)
class _Tenant:
    weight: float
    requests: dict[Request, None] = field(default_factory=dict)
    """In the order of admission."""

    @property
    def newest(self) -> Request:
        return next(reversed(self.requests))

    @property
    def is_spared(self) -> bool:
        return len(self.requests) == 1 and self.newest.num_preemptions >= MAX_PREEMPTIONS


class Running:
    """The running requests of all tenants."""

    def __init__(self, kv: KvBlocks, shares: Shares, max_num_seqs: int) -> None:
        self._kv = kv
        self._shares = shares
        self._max_num_seqs = max_num_seqs
        self.requests: dict[Request, None] = {}
        """In the order of admission."""
        self.kv_shares: dict[str, float] = {}
        """By tenant, as far as they were asked for in this step. Cleared at its beginning, as
        sequences have grown or shrunk since."""
        self._tenants: dict[str, _Tenant] = {}
        self.num_with_itl_target = 0
        """Requests with an ITL target."""

    def __contains__(self, request: object) -> bool:
        return request in self.requests

    @property
    def is_full(self) -> bool:
        return len(self.requests) >= self._max_num_seqs

    @property
    def num_free(self) -> int:
        """How many more may run."""
        return max(self._max_num_seqs - len(self.requests), 0)

    def start(self, request: Request, kv_share: float) -> None:
        """The request runs from now on; `kv_share` is what its known tokens will take."""
        self.requests[request] = None
        self.num_with_itl_target += request.targets.itl_seconds is not None
        tenant = self._tenants.get(request.tenant_id)
        if tenant is None:
            tenant = self._tenants[request.tenant_id] = _Tenant(request.tenant_weight)
        tenant.weight = request.tenant_weight
        tenant.requests[request] = None
        if request.tenant_id in self.kv_shares:
            self.kv_shares[request.tenant_id] += kv_share

    def stop(self, request: Request) -> None:
        del self.requests[request]
        self.num_with_itl_target -= request.targets.itl_seconds is not None
        tenant = self._tenants[request.tenant_id]
        del tenant.requests[request]
        self.kv_shares.pop(request.tenant_id, None)
        if not tenant.requests:
            del self._tenants[request.tenant_id]

    def num_of(self, tenant_id: str) -> int:
        tenant = self._tenants.get(tenant_id)
        return len(tenant.requests) if tenant else 0

    @property
    def share_of_one(self) -> float:
        """The part of the batch's places that one request takes."""
        return 1 / self._max_num_seqs

    def sequence_share(self, tenant_id: str) -> float:
        return self.num_of(tenant_id) / self._max_num_seqs

    def kv_share(self, tenant_id: str) -> float:
        """The sum over its requests: blocks that they share count for each, and so do those that
        their caches are compacted to next."""
        share = self.kv_shares.get(tenant_id)
        if share is None:
            tenant = self._tenants.get(tenant_id)
            share = self.kv_share_of(tenant.requests if tenant else ())
            self.kv_shares[tenant_id] = share
        return share

    def kv_share_of(self, requests: Iterable[Request]) -> float:
        """Their part of a tenant's `kv_share`."""
        return sum(
            self._kv.share(request.kv) + self._kv.target_share(request.kv) for request in requests
        )

    def of_lower_priority(self, request: Request) -> list[Request]:
        """The running requests of its tenant with a lower priority, the newest first."""
        tenant = self._tenants.get(request.tenant_id)
        requests = reversed(tenant.requests) if tenant else ()
        return [other for other in requests if other.priority > request.priority]

    def victim(self, measure: Measure) -> Request:
        """The newest request of the tenant that holds most for its weight."""
        best: _Tenant | None = None
        most, is_spared = -1.0, True
        for tenant_id, tenant in self._tenants.items():
            holding = measure(tenant_id) / tenant.weight
            # Who is spared gives way only where all are.
            if best is None or (is_spared, holding) > (tenant.is_spared, most):
                best, most, is_spared = tenant, holding, tenant.is_spared
        assert best, "there is a victim only where something runs"
        return best.newest

    def owes(self, request: Request, measure: Measure, share: float) -> bool:
        """Whether another tenant can give `share` and keep what it is entitled to.

        And whether that is not more than the request's tenant is entitled to, if it has anything.
        """
        held = measure(request.tenant_id)
        if held and held + share > self._shares.of(request.tenant_id) + ROUNDING:
            return False
        victim = self.victim(measure)
        tenant_id = victim.tenant_id
        if tenant_id == request.tenant_id or self._tenants[tenant_id].is_spared:
            return False
        return measure(tenant_id) - share >= self._shares.of(tenant_id) - ROUNDING
