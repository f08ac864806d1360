"""`loraplex ranks`: runs ranks of a group whose rank 0 is on another host."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from ...engine.shards.rank_address import parse_rank_address
from .engine_extra import need_engine
from .output import note

app = typer.Typer(add_completion=False)


@app.command()
def ranks(
    numbers: Annotated[list[int], typer.Argument(min=1, metavar="RANK...", help="Their numbers.")],
    rank_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="--rank-address of the server or agent.")
    ],
    rank_secret: Annotated[
        str, typer.Option(metavar="FILE", help="File with the secret of the group.")
    ],
) -> None:
    """Run ranks of a base model on this host until ^C or SIGTERM.

    The server or agent with --num-local-ranks runs the other ranks and tells these what to serve.
    They wait until it listens, and start again when the group has ended. The base model has to be
    at the same path on both hosts.
    """
    need_engine("serving")
    from ...adapters.logs import log_to_stderr
    from ...engine.process.engine_process import engine_environment
    from ...engine.ranks.group_secret import secret_of_file
    from ...engine.ranks.host_ranks import HostRanks, Membership

    membership = Membership(
        parse_rank_address(rank_address, "rank_address"), secret_of_file(rank_secret)
    )
    log_to_stderr()
    running = HostRanks(numbers, lambda: membership, engine_environment(os.environ))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: running.stop())
    note(f"Joining rank 0 at {membership.address}")
    running.run()
