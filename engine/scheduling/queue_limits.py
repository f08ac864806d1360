"""Limits of the waiting queue: its length, and each request's deadline and TTFT target.
Torch-free."""

from __future__ import annotations

from ..errors import Overloaded, TenantQueueFull
from ..request import Request

MIN_RETRY_SECONDS = 1.0


class QueueLimits:
    def __init__(self, *, max_queued: int, max_queued_per_tenant: int) -> None:
        self._max_queued = max_queued
        self._max_queued_per_tenant = max_queued_per_tenant

    def check(
        self,
        request: Request,
        *,
        num_queued: int,
        num_of_tenant: int,
        wait_seconds: float,
        patience_seconds: float,
    ) -> None:
        """Raises TenantQueueFull or Overloaded if the request could not run in time.

        `num_queued`: requests that wait now; `num_of_tenant`: those of the same tenant.
        `wait_seconds`: how long this one is expected to wait; `patience_seconds`: how long it may
        wait for its TTFT target.
        """
        later = max(wait_seconds, MIN_RETRY_SECONDS)
        if num_of_tenant >= self._max_queued_per_tenant:
            raise TenantQueueFull(retry_after_seconds=later)
        if num_queued >= self._max_queued:
            raise Overloaded(retry_after_seconds=later)
        deadline = request.submitted.deadline_seconds
        if deadline is not None and wait_seconds > deadline:
            raise Overloaded(
                f"The expected wait is about {wait_seconds:.1f} s, the deadline {deadline:.1f} s.",
                retry_after_seconds=later,
            )
        if wait_seconds > patience_seconds:
            raise Overloaded(
                f"The expected wait is about {wait_seconds:.2f} s, and the target for the first "
                f"token leaves {patience_seconds:.2f} s.",
                retry_after_seconds=max(wait_seconds - patience_seconds, MIN_RETRY_SECONDS),
            )
