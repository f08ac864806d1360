"""The memory of a server's processes over time, by role."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.growth import Growth, block_means, growth_of

from support.exact_usage import CHECKER, ENGINE, FETCHER, INTAKE, MODULES, SERVER
from support.processes import descendants

ROLES: Mapping[str, str] = {
    "loraplex.engine.process.main": ENGINE,
    MODULES[FETCHER]: FETCHER,
    MODULES[CHECKER]: CHECKER,
    MODULES[INTAKE]: INTAKE,
}
MEASURES = ("rss", "pss", "uss")
MEGABYTE = 10**6
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    rss: int
    """Resident, with what it shares."""
    pss: int
    """Resident, of what is shared its part."""
    uss: int
    """Resident and its own alone."""


def memory_of(pid: int) -> Memory:
    """Raises ProcessLookupError or FileNotFoundError if the process has ended."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = {name: int(number) * 1024 for name, number in _FIELD.findall(text)}
    own = fields["Private_Clean"] + fields["Private_Dirty"]
    return Memory(rss=fields["Rss"], pss=fields["Pss"], uss=own)


def role_of(command_line: str) -> str:
    """What a process of the server does, by its command line as Linux gives it."""
    words = command_line.split("\0")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
    return ROLES.get(module, module)


@dataclass
class History:
    """One process's memory: a sample after so many seconds each."""

    role: str
    seconds: list[float] = field(default_factory=list)
    samples: list[Memory] = field(default_factory=list)

    def growth(self, measure: str) -> Growth:
        """In megabytes an hour. Raises ValueError if it did not live for four minutes."""
        return growth_of(self.seconds, self._megabytes(measure))

    def summary(self) -> dict[str, object]:
        """Megabytes, and megabytes an hour."""
        return {measure: self._summary(measure) for measure in MEASURES}

    def _summary(self, measure: str) -> dict[str, object]:
        values, growth = self._megabytes(measure), self.growth(measure)
        return {
            "per_hour": round(growth.per_hour, 2),
            "interval": [round(growth.low, 2), round(growth.high, 2)],
            "first": round(values[0], 1),
            "last": round(values[-1], 1),
            "most": round(max(values), 1),
            "minutes": [round(mean, 2) for mean in block_means(self.seconds, values)[1]],
        }

    def _megabytes(self, measure: str) -> list[float]:
        return [getattr(sample, measure) / MEGABYTE for sample in self.samples]


class MemoryWatch:
    """Looks at a server and at all processes that it has started, again and again."""

    def __init__(self, server_pid: int, every_seconds: float) -> None:
        self._server_pid = server_pid
        self._every_seconds = every_seconds
        self._begun_at = time.monotonic()
        self._num_looks = 0
        self._by_pid: dict[int, History] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block is left, in a thread."""
        is_over = threading.Event()
        self._begun_at = time.monotonic()

        def watch() -> None:
            while not is_over.wait(self._every_seconds):
                self._look()

        watcher = threading.Thread(target=watch, name="memory-watch")
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    @property
    def long_lived(self) -> list[History]:
        """Of the processes that were there all the time."""
        return [each for each in self._by_pid.values() if len(each.samples) == self._num_looks]

    @property
    def passing(self) -> Counter[str]:
        """How many processes of each role were there for some of the time only."""
        histories = self._by_pid.values()
        return Counter(each.role for each in histories if len(each.samples) < self._num_looks)

    def _look(self) -> None:
        roles = {pid: role_of(line) for pid, line in descendants(self._server_pid).items()}
        roles[self._server_pid] = SERVER
        seconds = time.monotonic() - self._begun_at
        self._num_looks += 1
        for pid, role in roles.items():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                memory = memory_of(pid)
                history = self._by_pid.setdefault(pid, History(role))
                history.seconds.append(seconds)
                history.samples.append(memory)
