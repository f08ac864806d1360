"""A follower's process: `python -m loraplex.engine.ranks.main SOCKET RANK STORE PULSES CONFIG`.

SOCKET is the descriptor of its end of the pair to rank 0, STORE that of the file through which the
ranks find each other, PULSES that of their signs of life, CONFIG an EngineConfig as JSON. Its
standard input ends when rank 0 ends, and then it ends too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec
import torch

from ...adapters.logs import log_to_stderr
from ..config import EngineConfig
from ..errors import EngineError
from ..lifeline import end_with_parent
from ..model.base_model import choose_device
from ..shards.group_links import connect_group
from ..shards.rank_pulses import RankPulses
from ..shards.rank_sums import open_store
from .commands import Joined
from .follower import follow
from .rank_pipe import follower_pipe
from .rank_threads import threads_per_rank

_log = logging.getLogger("loraplex.engine.ranks.main")  # its own name is "__main__"


def main() -> int:
    """Follow rank 0 to its end; returns the exit status."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log_to_stderr()
    end_with_parent()
    descriptor, rank, store, beats, config_json = sys.argv[1:]
    for inherited in (descriptor, store, beats):
        os.set_inheritable(int(inherited), False)
    config = msgspec.json.decode(config_json, type=EngineConfig)
    torch.set_num_threads(threads_per_rank(config))
    shape = config.group_shape
    pipe = follower_pipe(Connection(int(descriptor)))
    try:
        pipe.send(Joined())
        pulses = RankPulses(shape.size, int(beats))
        device = choose_device(config.device)
        links = connect_group(open_store(int(store), shape.size), shape, int(rank), device, pulses)
        follow(config, links, pipe, int(rank))
    except EngineError as exc:  # rank 0 meets the same and reports it
        _log.error("rank_ended", extra={"rank": int(rank), "error": str(exc)})
        return 1
    except Exception:
        _log.exception("rank_failed", extra={"rank": int(rank)})
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # a loader thread that hangs must not keep a failed rank
