"""The event loop's access to threads that tenants share fairly."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ...adapters.tenant_threads import TenantThreads
from ..contract.errors import ApiError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class AsyncTenantThreads:
    """Runs blocking calls in its own threads, in the order of `TenantQueues`, and awaits them."""

    def __init__(self, name: str, num_threads: int, *, max_calls: float = math.inf) -> None:
        """`max_calls`: the maximum waiting and running calls of one tenant; more are refused."""
        self._threads = TenantThreads(name, num_threads)
        self._max_calls = max_calls
        self._num_calls: Counter[str | None] = Counter()

    def run(
        self,
        tenant_id: str | None,
        function: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> asyncio.Future[Result]:
        """The function's result. `tenant_id`: the owner of the call; None is the server itself.

        If the caller is cancelled, a running function keeps its thread until it ends, and a waiting
        one is never called. Raises ApiError if the tenant has too many calls.
        """
        if self._num_calls[tenant_id] >= self._max_calls:
            raise ApiError("tenant_queue_full")
        self._num_calls[tenant_id] += 1
        call = asyncio.wrap_future(self._threads.submit(tenant_id, function, *args, **kwargs))
        call.add_done_callback(lambda done: self._leave(tenant_id))
        return call

    def start(
        self,
        tenant_id: str | None,
        function: Callable[Parameters, object],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> None:
        """Run the function in the background; it handles its own errors."""
        self._threads.submit(tenant_id, function, *args, **kwargs)

    def close(self) -> None:
        """Wait for running calls; start no more."""
        self._threads.close()

    def _leave(self, tenant_id: str | None) -> None:
        self._num_calls[tenant_id] -= 1
        if not self._num_calls[tenant_id]:
            del self._num_calls[tenant_id]
