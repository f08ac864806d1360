"""Grammars on their way to being compiled: one after another on a thread, the tenants in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

from .cache import GrammarKey
from .matcher import Automaton
from .spec import GrammarSpec


class _Waiting(NamedTuple):
    spec: GrammarSpec
    compiled: Future[Automaton]


class Compilations:
    """However many grammars one tenant sends, another's next waits for one of each tenant's, and
    for the one that runs."""

    def __init__(self, compile_spec: Callable[[GrammarSpec], Automaton]) -> None:
        """`compile_spec` runs on the thread."""
        self._compile = compile_spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = Lock()
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """By tenant; whose turn is next comes first."""

    def submit(self, key: GrammarKey) -> Future[Automaton]:
        """The promise of the compiled; cancelled before its turn it is passed over."""
        waiting = _Waiting(key.spec, Future())
        with self._lock:
            self._lines.setdefault(key.tenant_id, deque()).append(waiting)
        self._thread.submit(self._run_next)
        return waiting.compiled

    def close(self) -> None:
        """Compile nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        spec, compiled = self._take_next()
        if not compiled.set_running_or_notify_cancel():
            return
        try:
            compiled.set_result(self._compile(spec))
        except BaseException as exc:
            compiled.set_exception(exc)

    def _take_next(self) -> _Waiting:
        with self._lock:
            tenant_id, line = self._lines.popitem(last=False)
            waiting = line.popleft()
            if line:
                self._lines[tenant_id] = line
            return waiting
