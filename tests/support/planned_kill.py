"""A group of ranks of which one is killed at a certain command: `python -m support.planned_kill`.

Its arguments are a `PlannedKill` as JSON, then those of the engine's process or of a follower's.
"""

from __future__ import annotations

import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from loraplex.engine.process import main as engine_main
from loraplex.engine.ranks import main as follower_main
from loraplex.engine.ranks import rank_group, rank_process
from loraplex.engine.ranks.follower import Follower
from loraplex.engine.ranks.followers import Followers
from loraplex.engine.shards.rank_sums import RankSums

MODULE = "support.planned_kill"


class Moment(StrEnum):
    """When a rank is killed."""

    BEFORE = "before it is sent"
    SENT = "when it has been sent"
    RECEIVED = "when it has been received"
    DONE = "when it has been done, or a job of it has begun"
    EXCHANGE = "in an exchange of it"


IN_FOLLOWERS = (Moment.RECEIVED, Moment.DONE, Moment.EXCHANGE)


class PlannedKill(msgspec.Struct, frozen=True):
    """One rank dies once, at the `number`-th command of a kind."""

    kind: str
    """The class of the command."""
    number: int
    moment: Moment
    rank: int
    marker: str
    """A file, which is written when it happens."""

    def command(self) -> tuple[str, ...]:
        """The command of the engine's process and of the followers, without their arguments."""
        plan = msgspec.json.encode(self).decode()
        return (sys.executable, "-P", "-m", MODULE, plan)

    def kill(self, pid: int) -> None:
        """Kill a process, unless one was killed before."""
        try:
            Path(self.marker).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(pid, signal.SIGKILL)


class _Counter:
    """Tells when the time has come."""

    def __init__(self, plan: PlannedKill) -> None:
        self._plan = plan
        self._left = plan.number

    def is_due(self, command: object) -> bool:
        self._left -= type(command).__name__ == self._plan.kind
        return self._left == 0


def run_engine(plan: PlannedKill) -> int:
    """The engine's process, which kills itself or a follower."""
    pids = [os.getpid()]
    start, send, counter = rank_process.start_rank, Followers._send, _Counter(plan)

    def start_and_note(*args: Any) -> Any:
        process = start(*args)
        pids.append(process.pid)
        return process

    def send_and_kill(followers: Followers, command: Any) -> None:
        is_due = counter.is_due(command) and plan.moment not in IN_FOLLOWERS
        if is_due and plan.moment is Moment.BEFORE:
            plan.kill(pids[plan.rank])
        send(followers, command)
        if is_due:
            plan.kill(pids[plan.rank])

    with (
        patch.object(rank_process, "COMMAND", plan.command()),
        patch.object(rank_group, "start_rank", start_and_note),
        patch.object(Followers, "_send", send_and_kill),
    ):
        return engine_main.main()


def run_follower(plan: PlannedKill) -> int:
    """A follower, which kills itself."""
    do, gather, add, counter = Follower._do, RankSums.gather, RankSums.add, _Counter(plan)
    is_in_it = False

    def do_and_die(follower: Follower, command: Any) -> None:
        nonlocal is_in_it
        is_due = counter.is_due(command)
        if is_due and plan.moment is Moment.RECEIVED:
            plan.kill(os.getpid())
        is_in_it = is_due and plan.moment is Moment.EXCHANGE
        do(follower, command)
        is_in_it = False
        if is_due and plan.moment is Moment.DONE:
            plan.kill(os.getpid())

    def die_or(exchange: Any) -> Any:
        def exchange_or_die(ranks: RankSums, part: Any) -> Any:
            if is_in_it:
                plan.kill(os.getpid())
            return exchange(ranks, part)

        return exchange_or_die

    with (
        patch.object(Follower, "_do", do_and_die),
        patch.object(RankSums, "gather", die_or(gather)),
        patch.object(RankSums, "add", die_or(add)),
    ):
        return follower_main.main()


def main() -> int:
    plan = msgspec.json.decode(sys.argv.pop(1), type=PlannedKill)
    is_engine = sys.argv[1].isdecimal()  # SOCKET HEARTBEAT CONFIG
    if is_engine:
        return run_engine(plan)
    if int(sys.argv[2]) == plan.rank and plan.moment in IN_FOLLOWERS:
        return run_follower(plan)
    return follower_main.main()


if __name__ == "__main__":
    os._exit(main())
