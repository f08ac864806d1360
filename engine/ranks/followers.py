"""The other ranks of a group, as rank 0 sees them.

A group lives and dies together. Once a follower is gone, every call raises RankLost, and the engine
process ends; its supervisor then starts the whole group anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock, Thread

from ...adapters.errors import AdapterUnavailable
from ..config import EngineConfig
from ..errors import RankLost
from ..messages import RankStats
from ..shards.rank_pulses import RankPulses
from .commands import (
    Command,
    JobCommand,
    JobDone,
    Joined,
    PulseReport,
    RankReport,
    ReadAdapter,
    StartRank,
    StoreGet,
    StoreSet,
    StoreValue,
)
from .file_sender import FileSender
from .rank_pipe import LeaderPipe
from .store_values import StoreValues

_log = logging.getLogger(__name__)


class Jobs:
    """One job on every follower."""

    def __init__(self, futures: Sequence[Future[JobDone]]) -> None:
        self._futures = futures

    def wait(self) -> list[JobDone]:
        """Return every follower's answer once all have done it.

        Raises FileNotFoundError if the file was not there, AdapterUnavailable for other errors of a
        follower, RankLost.
        """
        return [future.result() for future in self._futures]


class Followers:
    """Commands to all followers. Thread-safe."""

    def __init__(
        self,
        pipes: Sequence[LeaderPipe],
        close: Callable[[], None],
        senders: Sequence[FileSender] = (),
    ) -> None:
        """`close`: ends the followers, at last. `senders`: send the adapters' files to followers
        on other hosts."""
        self._pipes = pipes
        self._senders = senders
        self.values = StoreValues()
        """Through which the ranks find each other."""
        self.pulses = RankPulses(1 + len(pipes))
        """The signs of life that the followers have reported, and rank 0's own."""
        self.hosts: list[str] = []
        """The names of the followers' hosts, by their order."""
        self._close = close
        self._numbers = count(1)
        self._lock = Lock()
        """Held while a command goes to all: every follower gets the same order."""
        self._running: dict[tuple[int, int], Future[JobDone]] = {}
        """By follower and job."""
        self._reports: dict[int, tuple[RankStats, float]] = {}
        """By follower its last report, and when it came."""
        self._lost: str | None = None
        self._on_lost: Callable[[], None] = lambda: None
        self._is_closed = False

    def await_joined(self) -> None:
        """Return once every follower has said where it is. Raises RankLost if one has ended
        before."""
        for index, pipe in enumerate(self._pipes):
            try:
                message = pipe.receive()
            except (EOFError, OSError) as exc:
                raise RankLost(f"Rank {index + 1} ended before it had started.") from exc
            assert isinstance(message, Joined)
            self.hosts.append(message.host)
        for index in range(len(self._pipes)):
            Thread(target=self._hear, args=(index,), name=f"rank-{index + 1}", daemon=True).start()

    def tell(self, command: Command) -> None:
        """Let every follower do this, in the order of the calls. Raises RankLost."""
        with self._lock:
            self._send(command)

    def start(self, config: EngineConfig, own_host: str) -> None:
        """Let every follower connect to the other ranks and load. `own_host`: rank 0's. Raises
        RankLost."""
        with self._lock:
            for index, host in enumerate(self.hosts):
                num_here = [own_host, *self.hosts].count(host)
                self._send_to(index, StartRank(config, num_here))

    def begin(self, make: Callable[[int], JobCommand]) -> Jobs:
        """Let every follower do a job beside its steps. `make` takes the job's number. Raises
        RankLost."""
        with self._lock:
            number = next(self._numbers)
            futures: list[Future[JobDone]] = [Future() for _ in self._pipes]
            for index, future in enumerate(futures):
                self._running[index, number] = future
            self._send(make(number))
        return Jobs(futures)

    def check(self) -> None:
        """Raises RankLost if a follower is gone."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def reports(self) -> list[RankStats]:
        """The memory of the followers that have reported it, in the order of the ranks."""
        now = time.monotonic()
        return [
            replace(stats, age_seconds=now - received_at)
            for _, (stats, received_at) in sorted(self._reports.items())
        ]

    def lose(self, rank: int, reason: str) -> None:
        """A follower is of no use any more. All calls raise RankLost from now on."""
        self._lose(rank - 1, reason)

    def on_lost(self, call: Callable[[], None]) -> None:
        """Call this once a follower is of no use any more, in any thread."""
        self._on_lost = call

    def hang_up(self, rank: int) -> None:
        """End the connection to a follower, whose process ends then."""
        self._pipes[rank - 1].close()

    def close(self) -> None:
        """End the followers."""
        self._is_closed = True
        for pipe in self._pipes:
            pipe.close()
        for sender in self._senders:
            sender.close()
        self._close()

    def _send(self, command: Command) -> None:
        self.check()
        if isinstance(command, ReadAdapter):
            for sender in self._senders:
                for path in command.paths:
                    sender.send(Path(path))
        for index in range(len(self._pipes)):
            self._send_to(index, command)

    def _send_to(self, index: int, command: Command) -> None:
        try:
            self._pipes[index].send(command)
        except OSError as exc:
            self._lose(index, _ended(index))
            raise RankLost(self._lost) from exc

    def _hear(self, index: int) -> None:
        """Take one follower's answers until it is gone."""
        try:
            while True:
                message = self._pipes[index].receive()
                match message:
                    case PulseReport(pulse):
                        self.pulses.note(index + 1, pulse)
                    case JobDone():
                        self._end_job(index, message)
                    case RankReport(stats):
                        self._reports[index] = stats, time.monotonic()
                    case StoreSet(key, value):
                        self.values.set(key, value)
                    case StoreGet(key):
                        self.values.ask(key).add_done_callback(partial(self._answer, index))
        except (EOFError, OSError):
            pass
        finally:
            self._lose(index, _ended(index))

    def _answer(self, index: int, value: Future[bytes]) -> None:
        """Send a value for which a follower waits; if a rank is lost, the follower ends too."""
        if value.exception() is None:
            with suppress(OSError):
                self._pipes[index].send(StoreValue(value.result()))

    def _end_job(self, index: int, done: JobDone) -> None:
        future = self._running.pop((index, done.job), None)
        if future is None:
            return  # another follower was lost meanwhile, which has ended all jobs
        if done.error is None:
            future.set_result(done)
        elif done.is_missing:
            future.set_exception(FileNotFoundError(done.error))
        else:
            future.set_exception(AdapterUnavailable(done.error))

    def _lose(self, index: int, reason: str) -> None:
        if self._is_closed or self._lost is not None:
            return
        self._lost = reason
        _log.error("rank_lost", extra={"rank": index + 1, "error": reason})
        self.values.lose(RankLost(reason))
        for key in list(self._running):
            if (future := self._running.pop(key, None)) is not None:
                future.set_exception(RankLost(self._lost))
        self._on_lost()


def _ended(index: int) -> str:
    return f"Rank {index + 1} of the group has ended."
