"""A follower's process: `python -m loraplex.engine.ranks.main ADDRESS RANK FILES`.

ADDRESS is where rank 0 listens, RANK the follower's, FILES where it has the adapters' files from.
Its standard input tells it the group's secret, see `start_rank`. When that ends, or the connection
to rank 0, the process ends too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from ...adapters.logs import log_to_stderr
from ..errors import EngineError
from ..lifeline import end_with_parent
from ..model.base_model import choose_device
from ..shards.group_links import connect_group
from ..shards.rank_address import RankAddress, parse_rank_address
from ..shards.rank_pulses import RankPulses
from .adapter_files import AdapterFiles, LocalFiles, SentFiles
from .commands import Joined, StartRank
from .follower import follow
from .pulse_reports import reporting_pulse
from .rank_handshake import Purpose, RankLink, join
from .rank_listener import set_options
from .rank_pipe import FollowerPipe, follower_pipe
from .rank_process import FilesFrom, read_secret
from .rank_store import FollowerValues, RankStore
from .rank_threads import threads_per_rank

_STDOUT = 1
_CONNECT_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
"""Until rank 0 is asked again, if it does not listen."""

_log = logging.getLogger("loraplex.engine.ranks.main")  # its own name is "__main__"


def main() -> int:
    """Follow rank 0 to its end; returns the exit status."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log_to_stderr()
    try:
        secret = read_secret(sys.stdin.fileno())
    except EOFError:
        return 0
    end_with_parent()
    address, rank, files = sys.argv[1:]
    try:
        _follow(parse_rank_address(address, "address"), int(rank), FilesFrom(files), secret)
    except EngineError as exc:  # rank 0 meets the same and reports it
        _log.error("rank_ended", extra={"rank": int(rank), "error": str(exc)})
        return 1
    except Exception:
        _log.exception("rank_failed", extra={"rank": int(rank)})
        return 1
    return 0


def _follow(address: RankAddress, rank: int, files_from: FilesFrom, secret: bytes) -> None:
    """Join rank 0 and do what it says, until it is gone."""
    connected = _await_rank_0(address, RankLink(rank, Purpose.COMMANDS), secret)
    own_host = connected.getsockname()[0]
    pipe = follower_pipe(Connection(connected.detach()))
    files: AdapterFiles = LocalFiles()
    if files_from is FilesFrom.RANK_0:
        link = RankLink(rank, Purpose.FILES)
        files = SentFiles(Connection(_connect(address, link, secret).detach()))
    pipe.send(Joined(socket.gethostname()))
    start = _await_start(pipe)
    if start is None:
        return
    torch.set_num_threads(threads_per_rank(start.config, start.num_ranks_here))
    shape = start.config.group_shape
    pulses = RankPulses(shape.size)
    on_report = _show_life if files_from is FilesFrom.RANK_0 else _do_nothing
    with reporting_pulse(pulses.of(rank), pipe, on_lost=_end, on_report=on_report):
        store = RankStore(FollowerValues(pipe))
        device = choose_device(start.config.device)
        links = connect_group(store, shape, rank, device, pulses, host=own_host)
        follow(start.config, links, pipe, rank, files)


def _await_rank_0(address: RankAddress, link: RankLink, secret: bytes) -> socket.socket:
    """The connection for commands. Waits until rank 0 listens. Raises RankRefused."""
    while True:
        try:
            return _connect(address, link, secret)
        except (OSError, EOFError):
            time.sleep(_PAUSE_SECONDS)


def _connect(address: RankAddress, link: RankLink, secret: bytes) -> socket.socket:
    """A connection on which rank 0 has admitted this one. Raises RankRefused, OSError, EOFError."""
    connected = socket.create_connection(address, timeout=_CONNECT_SECONDS)
    try:
        join(connected, link, secret)
        set_options(connected)
    except BaseException:
        connected.close()
        raise
    return connected


def _await_start(pipe: FollowerPipe) -> StartRank | None:
    """The first command; None if rank 0 has ended, since another rank did not join."""
    try:
        start = pipe.receive()
    except (EOFError, OSError):
        return None
    assert isinstance(start, StartRank), "it is the first command"
    return start


def _show_life() -> None:
    """Tell the process that started this one, which ends it if it hangs: rank 0 cannot."""
    with suppress(OSError):  # that one is gone, which ends this one
        os.write(_STDOUT, b".")


def _do_nothing() -> None:
    """Rank 0 has started this process and watches it."""


def _end() -> None:
    """The main thread may wait for another rank whose connections stay open."""
    _log.error("rank_ended", extra={"error": "Rank 0 cannot be reached."})
    os._exit(1)


if __name__ == "__main__":
    os._exit(main())  # a loader thread that hangs must not keep a failed rank
