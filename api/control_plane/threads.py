"""Thread pools for blocking work, so that the event loop never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WorkerThreads:
    """A bounded pool for one kind of blocking work, so that kinds cannot starve each other."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def run(
        self,
        function: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> asyncio.Future[Result]:
        """The function's result; it runs to its end even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Wait for running calls; start no more."""
        self._executor.shutdown(cancel_futures=True)
