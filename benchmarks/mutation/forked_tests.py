"""A pytest plugin that runs tests against changed functions, each change in a forked process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import msgspec
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
_SHOWN_CHARACTERS = 160
_FAILED, _SPARE_SECONDS = 1, 30.0


class Mutant(msgspec.Struct, frozen=True):
    """A file with one small change in a function."""

    path: str
    """From the root of the repository."""
    line: int
    mutator: str
    before: str
    after: str
    source: str
    """Of the whole file, changed."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.mutator}"

    def __str__(self) -> str:
        before, after = map(_shortened, (self.before, self.after))
        return f"{self.name}: {before} => {after}"


class Outcome(StrEnum):
    CAUGHT = "caught"
    SURVIVED = "survived"
    NOT_CALLED = "not called"
    """No test calls the function in its own process."""
    NOT_APPLIED = "not applied"
    """The changed function has other closure variables, or is not there any more."""


class ForkedTests:
    """Runs all collected tests once, then those of each mutant's function against the mutant."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        note: Callable[[Mutant, Outcome], None],
        *,
        max_seconds: float,
    ) -> None:
        """`max_seconds`: of tests for one mutant, the fastest first."""
        self._mutants = mutants
        self._note = note
        self._max_seconds = max_seconds
        self._seconds: dict[pytest.Item, float] = {}
        self._callers: dict[CodeType, list[pytest.Item]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # else the functions are not found
        files = {str((ROOT / mutant.path).resolve()) for mutant in self._mutants}
        functions = _functions_of(files)
        self._run_unchanged(session.items, functions)
        gc.collect()
        gc.freeze()  # a collection in a forked process would copy all pages
        for mutant in self._mutants:
            self._note(mutant, self._try(mutant, functions))
        return True

    def _run_unchanged(self, items: Sequence[pytest.Item], codes: Iterable[CodeType]) -> None:
        """Learn which tests call which functions, and how long they take."""
        by_id = {id(code): code for code in codes}
        for item, after in zip(items, [*items[1:], None], strict=True):
            start = time.monotonic()
            with _calls(by_id) as called:
                reports = runtestprotocol(item, log=False, nextitem=after)
            self._seconds[item] = time.monotonic() - start
            if any(report.failed for report in reports):
                print(f"left out, as it fails without a change: {item.nodeid}", file=sys.__stderr__)
                continue
            for number in called:
                self._callers.setdefault(by_id[number], []).append(item)

    def _try(self, mutant: Mutant, functions: dict[CodeType, list[FunctionType]]) -> Outcome:
        before = compile((ROOT / mutant.path).read_text(), mutant.path, "exec", dont_inherit=True)
        after = compile(mutant.source, mutant.path, "exec", dont_inherit=True)
        old, new = _changed_function(before, after)
        found = functions.get(old, [])
        if not found or old.co_freevars != new.co_freevars:
            return Outcome.NOT_APPLIED
        tests = list(self._fastest(self._callers.get(old, [])))
        if not tests:
            return Outcome.NOT_CALLED
        limit = 4 * sum(map(self._seconds.__getitem__, tests)) + _SPARE_SECONDS
        child = multiprocessing.get_context("fork").Process(target=_run, args=(tests, found, new))
        child.start()
        child.join(limit)
        has_passed = child.exitcode == 0
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # and what the tests started
        child.join()
        return Outcome.SURVIVED if has_passed else Outcome.CAUGHT

    def _fastest(self, tests: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
        seconds = 0.0
        for test in sorted(tests, key=self._seconds.__getitem__):
            if seconds < self._max_seconds:
                yield test
            seconds += self._seconds[test]


def _run(tests: Sequence[pytest.Item], functions: Sequence[FunctionType], code: CodeType) -> None:
    """In the forked process, until a test fails."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for function in functions:
        function.__code__ = code
    for test, after in zip(tests, [*tests[1:], None], strict=True):
        if any(report.failed for report in runtestprotocol(test, log=False, nextitem=after)):
            os._exit(_FAILED)
    os._exit(0)


@contextmanager
def _calls(codes: dict[int, CodeType]) -> Iterator[set[int]]:
    """Those of the codes, by their ids, that this thread and new ones enter."""
    called: set[int] = set()

    def enter(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (number := id(frame.f_code)) in codes:
            called.add(number)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _functions_of(files: set[str]) -> dict[CodeType, list[FunctionType]]:
    """All functions of these files that are in memory, by their code."""
    found: dict[CodeType, list[FunctionType]] = {}
    real: dict[str, bool] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType:  # `isinstance` asks deprecated objects for their class
            file = thing.__code__.co_filename
            if file not in real:
                real[file] = os.path.realpath(file) in files
            if real[file]:
                found.setdefault(thing.__code__, []).append(thing)
    return found


def _changed_function(before: CodeType, after: CodeType) -> tuple[CodeType, CodeType]:
    """The outermost function that differs, in both. Those below it differ in their lines only."""
    pairs = zip(_codes_in(before), _codes_in(after), strict=False)
    old, new = next(pair for pair in pairs if pair[0] != pair[1])
    is_class = not old.co_flags & 1  # CO_OPTIMIZED: its variables are in slots
    return _changed_function(old, new) if is_class else (old, new)


def _shortened(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (each for each in code.co_consts if isinstance(each, CodeType))
