"""The adapters of requests: expected while they wait, leased while they run. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from ...adapters.errors import ObjectCorrupt, ObjectNotFound
from ...adapters.identity import AdapterKey
from ...adapters.tier import Tier
from ..errors import (
    AdapterDeleted,
    AdapterLoadFailed,
    AdapterLost,
    AdapterNotComposable,
    AdapterTooLarge,
    EngineError,
)
from ..request import Request
from .adapter_provider import AdapterProvider
from .waiting import WaitingQueue

EXPECT_INTERVAL_SECONDS = 0.05
"""How often the adapter manager is told which adapters are needed next."""
MAX_EXPECTED = 256
"""Adapter queues that are announced, or those of two batches if that is more. The order of later
ones makes no difference yet."""

LOAD_ERRORS: dict[str, type[EngineError]] = {
    AdapterDeleted.code: AdapterDeleted,
    AdapterTooLarge.code: AdapterTooLarge,
    AdapterNotComposable.code: AdapterNotComposable,
    ObjectNotFound.code: AdapterLost,
    ObjectCorrupt.code: AdapterLost,
}
"""What a caller can act on; every other failure of a load is one for the operator's log."""


class AdapterLeases:
    """Asks the adapter manager on behalf of requests; one for the base model needs nothing.

    The adapter manager counts a request's lease as long as the request has it and, after that, as
    long as a step in flight uses it.
    """

    def __init__(
        self, manager: AdapterProvider, clock: Callable[[], float], *, max_num_seqs: int
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._max_expected = max(MAX_EXPECTED, 2 * max_num_seqs)
        self.late: dict[str, Request] = {}
        """By id, the requests whose leases end once the steps in flight are read."""
        self.num_steps_read = 0
        """Later ones that were launched are in flight; see `Request.last_step`."""
        self.next_expect_time = 0.0
        """When `expect_next` is due."""

    # --- what is expected -------------------------------------------------------------------------

    def expect_last(self, request: Request) -> None:
        """A request has come."""
        if request.adapter:
            self._manager.expect_last(request.adapter)

    def expect_next(self, waiting: WaitingQueue[Request]) -> None:
        """Say whose turn is next, however full the batch is: their adapters are loaded meanwhile,
        and stay for them."""
        self.next_expect_time = self._clock() + EXPECT_INTERVAL_SECONDS
        queues = waiting.next_adapters(self._max_expected)
        self._manager.expect(queue for queue in queues if isinstance(queue, AdapterKey))

    def expect_none(self) -> None:
        """No request is left."""
        self._manager.expect(())

    # --- one request's lease ----------------------------------------------------------------------

    def is_settled(self, request: Request) -> bool:
        """Whether its adapter is on the device or has failed; if not, its wait for it begins."""
        if request.adapter is None or self._manager.is_settled(request.adapter):
            return True
        self._note_missing(request)
        return False

    def load_error(self, request: Request) -> EngineError | None:
        """Why the request must end: its adapter cannot be had."""
        failure = self._manager.failure(request.adapter) if request.adapter else None
        if failure is None:
            return None
        error = LOAD_ERRORS.get(failure.code, AdapterLoadFailed)
        return error(f"{error.__doc__} {failure.message}")

    def take(self, request: Request, cap: float) -> bool:
        """Take the lease; False if the adapter is absent, or brings its tenant above the cap.

        `cap`: the part of the arena that the tenant may lease; what it leases already is granted.
        """
        if request.adapter is None:
            return True
        if request.request_id in self.late:  # of an ended request with the same id
            return False
        tenant_id = request.tenant_id
        before = self._manager.leased_share(tenant_id)
        request.lease = self._manager.acquire(request.adapter, request.request_id)
        if request.lease is None:
            self._note_missing(request)
            return False
        if self._manager.leased_share(tenant_id) > max(before, cap):
            self.give_back(request)
            return False
        if request.adapter_missing_since is not None:
            request.adapter_wait_seconds += self._clock() - request.adapter_missing_since
            request.adapter_missing_since = None
        self._charge_load(request, request.adapter)
        return True

    def give_back(self, request: Request) -> None:
        """End the request's lease, if it has one: at once, or once no step in flight uses it."""
        if request.lease and request.last_step > self.num_steps_read:
            self.late[request.request_id] = request
        elif request.request_id not in self.late:
            self._manager.release(request.request_id)
        request.lease = None

    def give_back_late(self) -> None:
        """End the leases that no step in flight uses any more."""
        for request_id, request in tuple(self.late.items()):
            if request.last_step <= self.num_steps_read:
                del self.late[request_id]
                self._manager.release(request_id)

    def _charge_load(self, request: Request, adapter: AdapterKey) -> None:
        """Charge the request with the load of its adapter, if it is the first that uses it."""
        num_bytes = self._manager.claim_load(adapter)
        request.loaded_bytes += num_bytes
        if num_bytes and self._manager.loaded_from(adapter) is Tier.STORE:
            request.fetched_bytes += num_bytes

    def _note_missing(self, request: Request) -> None:
        if request.adapter_missing_since is None:
            request.adapter_missing_since = self._clock()

    # --- where the adapter is and was -------------------------------------------------------------

    def tier_of(self, request: Request) -> Tier | None:
        """Where the request's adapter is now; None for the base model."""
        return None if request.adapter is None else self._manager.tier(request.adapter)

    def found_tier(self, request: Request) -> Tier | None:
        """Where the adapter was when the request came; what lay on disk only the fetcher knew."""
        if request.adapter is None or request.adapter_tier is not Tier.STORE:
            return request.adapter_tier
        return self._manager.loaded_from(request.adapter) or Tier.STORE

    def load_ms(self, request: Request) -> float | None:
        """How long the load took that the request waited for; None for the base model."""
        if request.adapter is None:
            return None
        if request.adapter_tier is Tier.DEVICE and not request.adapter_wait_seconds:
            return 0.0
        return 1e3 * self._manager.load_seconds(request.adapter)
