"""Runs the ranks of one host that belong to a group whose rank 0 is on another host. Torch-free."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event
from typing import NamedTuple

from ..heartbeat import StallWatch
from ..shards.rank_address import RankAddress
from .rank_process import FilesFrom, RankProcess, end_ranks, start_rank

LOOK_SECONDS = 0.5
"""Between looks at the ranks: one that was alive and is silent for SILENT_LOOKS hangs."""
PAUSE_SECONDS = 1.0
"""Between the end of the ranks and their next start."""

_READ_BYTES = 1 << 16

_log = logging.getLogger(__name__)


class Membership(NamedTuple):
    """What a rank needs to join its group."""

    address: RankAddress
    """Where rank 0 listens."""
    secret: bytes


class HostRanks:
    """Starts the ranks again whenever one has ended or hangs: they wait for rank 0 and join it."""

    def __init__(
        self,
        ranks: Sequence[int],
        find: Callable[[], Membership | None],
        environment: Mapping[str, str],
    ) -> None:
        """`find`: how to join, before each start; None: this is not known yet."""
        self._ranks = ranks
        self._find = find
        self._environment = environment
        self._is_stopping = Event()

    def run(self) -> None:
        """Until `stop`."""
        while not self._is_stopping.is_set():
            membership = self._find()
            if membership is not None:
                self._run_once(membership)
            self._is_stopping.wait(PAUSE_SECONDS)

    def stop(self) -> None:
        """End the ranks; does not wait."""
        self._is_stopping.set()

    def _run_once(self, membership: Membership) -> None:
        """Run the ranks until one has ended."""
        processes: list[RankProcess] = []
        try:
            for rank in self._ranks:
                processes.append(start_rank(*membership, rank, FilesFrom.RANK_0, self._environment))
            lives = {rank: _Life(each) for rank, each in zip(self._ranks, processes, strict=True)}
            while not self._is_stopping.wait(LOOK_SECONDS):
                if over := [rank for rank, life in lives.items() if life.is_over()]:
                    _log.warning("ranks_ended", extra={"ranks": over})
                    return
        finally:
            end_ranks(processes)


class _Life:
    """The signs of life of one process."""

    def __init__(self, process: RankProcess) -> None:
        assert process.stdout is not None
        self._process = process
        self._descriptor = process.stdout.fileno()
        os.set_blocking(self._descriptor, False)
        self._watch = StallWatch()
        self._num_signs = 0

    def is_over(self) -> bool:
        """Whether it has ended or hangs. One that loads shows no life yet."""
        with suppress(BlockingIOError):
            self._num_signs += len(os.read(self._descriptor, _READ_BYTES))
        hangs = self._watch.look(self._num_signs, has_work=self._num_signs > 0)
        return hangs or self._process.poll() is not None
