"""The threads that read, copy and zero adapters' bytes while the engine's loop runs.

They use at most a set share of a core while a step could run (see `Pace`). One thread is reserved
for small adapters, so these never wait for a very large one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SMALL_BYTES = 64 << 20
"""Any thread may run jobs of up to this many bytes. Of larger jobs, at most one fewer than there
are threads run at once."""


class Loaders(Protocol):
    """Runs jobs concurrently, in any order."""

    def submit(
        self, num_bytes: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Run `fn` in a thread; `num_bytes` is the approximate amount that it reads or writes."""


class Pace:
    """The share of a core that the loader threads may use.

    While the engine has requests in its batch, all threads together use `duty` seconds of CPU time
    per second and sleep in between, after every piece of work. So the core is free for the steps'
    own threads the rest of the time, and memory bandwidth is shared in the same proportion. While
    no step runs, nothing is delayed.
    """

    def __init__(
        self,
        duty: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert duty > 0
        self.is_busy = False
        """Set by the engine's loop: whether steps run that must not be delayed."""
        self._duty = duty
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        """When the pause for the work so far ends."""

    def rest(self, worked_seconds: float) -> None:
        """Called by a loader thread with its work time since the last pause: sleep for the pace."""
        if not self.is_busy or self._duty >= 1:
            return
        now = self._clock()
        with self._lock:
            begun_at = max(self._free_at, now - worked_seconds)
            self._free_at = begun_at + worked_seconds / self._duty
            seconds = self._free_at - now
        if seconds > 0:
            self._sleep(seconds)


UNPACED = Pace(1.0)
"""A pace for owners without steps."""


class Paced:
    """One job's use of the pace: `with Paced(pace) as work: ...; work.pause()`."""

    QUANTUM_SECONDS = 0.0005
    """Work between two pauses: much less than a step."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since = time.thread_time()

    def pause(self) -> None:
        """Call between two pieces of work: pauses if the pace requires it."""
        worked = time.thread_time() - self._since
        if worked >= self.QUANTUM_SECONDS:
            self._pace.rest(worked)
            self._since = time.thread_time()


class LoaderThreads:
    """`num_threads` threads that run jobs in order; large jobs never occupy all of them."""

    def __init__(self, num_threads: int = 2) -> None:
        assert num_threads >= 1
        self._max_large = max(1, num_threads - 1)
        self._num_large = 0
        self._jobs: deque[_Job] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"adapter-loader-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, num_bytes: int, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as exc:
                future.set_exception(exc)

        with self._changed:
            assert not self._is_closed, "the loader threads have ended"
            self._jobs.append(_Job(run, num_bytes > SMALL_BYTES, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the threads after the running jobs; the others are cancelled."""
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                job.future.cancel()
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while job := self._take():
            job.run()
            if job.is_large:
                with self._changed:
                    self._num_large -= 1
                    self._changed.notify_all()

    def _take(self) -> _Job | None:
        with self._changed:
            while True:
                may_be_large = self._num_large < self._max_large
                job = next((job for job in self._jobs if may_be_large or not job.is_large), None)
                if job is not None:
                    self._jobs.remove(job)
                    self._num_large += job.is_large
                    return job
                if self._is_closed:
                    return None
                self._changed.wait()


class _Job:
    def __init__(self, run: Callable[[], None], is_large: bool, future: Future[T]) -> None:
        self.run = run
        self.is_large = is_large
        self.future = future
