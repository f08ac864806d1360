"""Runs the ranks of one host that belong to a group whose rank 0 is on another host. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Event
from typing import NamedTuple

from ..shards.rank_address import RankAddress
from .rank_process import FilesFrom, RankProcess, end_ranks, start_rank

LOOK_SECONDS = 0.2
PAUSE_SECONDS = 1.0
"""Between the end of the ranks and their next start."""

_log = logging.getLogger(__name__)


class Membership(NamedTuple):
    """What a rank needs to join its group."""

    address: RankAddress
    """Where rank 0 listens."""
    secret: bytes


class HostRanks:
    """Starts the ranks again whenever one has ended: they wait for rank 0 and join it."""

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
            while not self._is_stopping.wait(LOOK_SECONDS):
                if any(process.poll() is not None for process in processes):
                    _log.warning("ranks_ended", extra={"ranks": list(self._ranks)})
                    return
        finally:
            end_ranks(processes)
