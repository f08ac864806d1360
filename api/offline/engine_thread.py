"""An engine in this process, in a thread of its own.

The thread is what makes ^C safe: it interrupts the caller, who waits, and never a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch

from ...adapters.identity import AdapterKey
from ...adapters.manager import Tier
from ...engine.config import EngineConfig
from ...engine.core import EngineCore
from ...engine.errors import EngineUnavailable
from ...engine.messages import (
    Abort,
    AdapterFetched,
    AdapterWanted,
    EngineInfo,
    FromEngine,
    GenerationRequest,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    StepEvents,
    Submit,
    TokensGenerated,
)
from ...engine.parts import open_parts

RequestEvent = RequestStarted | PromptOutput | TokensGenerated | RequestFinished

MAX_OPEN_REQUESTS = 1024
"""In the engine at once, unless its queue is shorter; the others wait in the caller's iterator."""
IDLE_SECONDS = 0.001
"""Between steps that have nothing to tell, as while an adapter is loaded."""

T = TypeVar("T")


class EngineThread:
    """Runs requests, one call at a time."""

    def __init__(self, config: EngineConfig, block_of: Callable[[AdapterKey], Path]) -> None:
        """Load the base. `block_of`: the file of an examined adapter. Raises EngineError."""
        self._max_open = min(MAX_OPEN_REQUESTS, config.max_queued, config.max_queued_per_tenant)
        self._block_of = block_of
        self._is_cancelled = Event()
        self._is_broken = False
        self._num_threads = torch.get_num_threads()
        """The caller's. What the engine sets applies to its own thread and to later ones."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loraplex-engine")
        try:
            self._core = self._wait(self._thread.submit(_open, config, self._num_threads))
        except BaseException:
            self._end_thread()
            raise
        self.info: EngineInfo = self._core.info

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self.info.max_model_len

    def run(
        self,
        requests: Iterable[GenerationRequest],
        take: Callable[[RequestEvent], bool],
    ) -> None:
        """Run all requests to their ends.

        `take` gets each event, in the engine's thread; True: its request is complete, and nothing
        more is told of it. An error of `take` or of `requests`, and ^C, end all requests and are
        raised. Raises EngineUnavailable after a step has failed.
        """
        self._is_cancelled.clear()
        self._wait(self._thread.submit(self._run, requests, take))

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._is_cancelled.set()
        self._end_thread()
        self._core.close()

    def _end_thread(self) -> None:
        """Threads that the program starts later have its own number of CPU threads again."""
        with suppress(RuntimeError):  # this one has ended, or the interpreter does
            self._thread.submit(torch.set_num_threads, self._num_threads)
        self._thread.shutdown()

    def _wait(self, result: Future[T]) -> T:
        try:
            return result.result()
        except BaseException:
            self._is_cancelled.set()
            if not result.done():
                result.exception()
            raise

    # --- in the engine's thread -------------------------------------------------------------------

    def _run(
        self, requests: Iterable[GenerationRequest], take: Callable[[RequestEvent], bool]
    ) -> None:
        if self._is_broken:
            raise EngineUnavailable("The engine has failed before: make a new LLM.")
        waiting = iter(requests)
        open_ids: set[str] = set()
        try:
            while self._submit(waiting, open_ids) and not self._is_cancelled.is_set():
                for event in self._step():
                    self._deliver(event, open_ids, take)
        finally:
            self._abort(open_ids)

    def _submit(self, waiting: Iterator[GenerationRequest], open_ids: set[str]) -> bool:
        """Give the engine as many requests as may be open; False: none is."""
        while len(open_ids) < self._max_open and (request := next(waiting, None)):
            open_ids.add(request.request_id)
            self._core.handle(Submit(request))
        return bool(open_ids)

    def _deliver(
        self, event: RequestEvent, open_ids: set[str], take: Callable[[RequestEvent], bool]
    ) -> None:
        if event.request_id not in open_ids:
            return  # the caller has aborted it
        has_ended = isinstance(event, RequestFinished)
        if has_ended:
            open_ids.remove(event.request_id)
        if take(event) and not has_ended:
            open_ids.remove(event.request_id)
            self._core.handle(Abort(event.request_id))

    def _step(self) -> list[RequestEvent]:
        """One step and its events; the engine's other messages are answered."""
        try:
            messages = self._core.step()
        except BaseException:
            self._is_broken = True
            raise
        if not messages:
            time.sleep(IDLE_SECONDS)
        return [event for message in messages for event in self._events(message)]

    def _events(self, message: FromEngine) -> Iterable[RequestEvent]:
        match message:
            case StepEvents(started, tokens, finished, prompts):
                return (*started, *prompts, *tokens, *finished)
            case AdapterWanted(key):
                paths = tuple(str(self._block_of(part)) for part in key.parts)
                self._core.handle(AdapterFetched(key, paths, Tier.DISK))
        return ()

    def _abort(self, open_ids: set[str]) -> None:
        if not open_ids or self._is_broken:
            return
        for request_id in open_ids:
            self._core.handle(Abort(request_id))
        while self._core.has_work:  # so that nothing of them is left for the next call
            self._step()


def _open(config: EngineConfig, num_threads: int) -> EngineCore:
    torch.set_num_threads(num_threads)  # another engine may have changed that of new threads
    return EngineCore(open_parts(config))
