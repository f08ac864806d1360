"""Where the scheduler meets the adapter manager. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ...adapters.identity import AdapterKey
from ...adapters.leases import Lease
from ...adapters.record import Failure
from ...adapters.tier import Tier


class AdapterProvider(Protocol):
    """What the scheduler needs of the adapter manager. No call waits for an adapter's bytes."""

    def expect(self, keys: Iterable[AdapterKey]) -> None:
        """Set the adapters that waiting requests need, in the order of their next use."""

    def expect_last(self, key: AdapterKey) -> None:
        """A request for this adapter has arrived: the adapter is needed last."""

    def is_settled(self, key: AdapterKey) -> bool:
        """Whether it is resident, failed or deleted: of any other `acquire` grants no lease."""

    def failure(self, key: AdapterKey) -> Failure | None:
        """Why requests for this adapter must end, or None: wait, or ask `acquire`."""

    def acquire(self, key: AdapterKey, request_id: str) -> Lease | None:
        """Lease a resident adapter to a request; None if it cannot be leased now."""

    def release(self, request_id: str) -> None:
        """End a request's lease; without one, nothing happens."""

    def leased_share(self, tenant_id: str) -> float:
        """The part of the arena under leases of this tenant's requests."""

    def tier(self, key: AdapterKey) -> Tier:
        """Where the adapter is now."""

    def loaded_from(self, key: AdapterKey) -> Tier | None:
        """Where the load that made this adapter resident found it; None if it is not resident."""

    def load_seconds(self, key: AdapterKey) -> float:
        """How long the load took that made this adapter resident; 0 if it is not."""

    def claim_load(self, key: AdapterKey) -> int:
        """The bytes that this load copied to the device; 0 if it was claimed before."""
