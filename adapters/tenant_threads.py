"""A thread pool that tenants share fairly: a tenant with much work delays only itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .tenant_queues import TenantQueues

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Call(NamedTuple):
    outcome: Future[Any]
    function: Callable[[], Any]

    def run(self) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as exc:
            self.outcome.set_exception(exc)
        else:
            self.outcome.set_result(result)


class TenantThreads:
    """A bounded pool of threads, assigned by `TenantQueues`."""

    def __init__(self, name: str, num_threads: int, *, max_held: int | None = None) -> None:
        """`max_held`: threads of one tenant, see `TenantQueues`."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._queues: TenantQueues[_Call] = TenantQueues(num_threads, max_held=max_held)
        self._is_closed = False

    def submit(
        self,
        tenant: Hashable,
        function: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Future[Result]:
        """The future of the function's result. If it is cancelled before the function starts, the
        function is never called.

        `tenant`: the owner of the work; None is the server itself. Raises RuntimeError after
        `close`.
        """
        call = _Call(Future(), partial(function, *args, **kwargs))
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the threads have ended")
            self._queues.add(tenant, call)
            self._begin()
        call.outcome.add_done_callback(lambda outcome: self._forget(tenant, call, outcome))
        return call.outcome

    def close(self, *, wait: bool = True) -> None:
        """Start nothing more and cancel waiting calls; `wait` for running ones."""
        with self._lock:
            self._is_closed = True
            waiting = self._queues.clear()
        for call in waiting:
            call.outcome.cancel()
        self._executor.shutdown(wait)

    def _forget(self, tenant: Hashable, call: _Call, outcome: Future[Any]) -> None:
        """Drop a cancelled call from the queue at once."""
        if outcome.cancelled():
            with self._lock:
                self._queues.remove(tenant, call)

    def _begin(self) -> None:
        """Give idle threads their next work; the lock is held."""
        while taken := self._queues.take():
            self._executor.submit(self._run, *taken)

    def _run(self, tenant: Hashable, call: _Call) -> None:
        call.run()
        with self._lock:
            self._queues.end(tenant)
            self._begin()
