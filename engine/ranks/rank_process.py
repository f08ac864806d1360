"""Starts and ends the process of one follower. Torch-free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum

from ..shards.rank_address import RankAddress

COMMAND = (sys.executable, "-P", "-m", "loraplex.engine.ranks.main")
SECRET_BYTES = 32
_STDERR = 2
_END_SECONDS = 5.0
_DUMP_SECONDS = 0.5


class FilesFrom(StrEnum):
    """Where a follower has the adapters' files from."""

    DISK = "disk"
    """It runs on rank 0's host."""
    RANK_0 = "rank-0"


RankProcess = subprocess.Popen[bytes]


def start_rank(
    address: RankAddress,
    secret: bytes,
    rank: int,
    files: FilesFrom,
    environment: Mapping[str, str],
) -> RankProcess:
    """Start a follower that joins rank 0 at this address; it ends with this process.

    Its standard input tells it the secret, SECRET_BYTES, and ends when this process ends. One with
    its files from rank 0 shows signs of life on its standard output, which is a pipe.
    """
    process = subprocess.Popen(
        [*COMMAND, str(address), str(rank), files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if files is FilesFrom.RANK_0 else _STDERR,
        env=environment,
        bufsize=0,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which its status tells
        process.stdin.write(secret)
    return process


def read_secret(descriptor: int) -> bytes:
    """The secret that `start_rank` has written. Raises EOFError if the other end is gone."""
    secret = b""
    while len(secret) < SECRET_BYTES:
        more = os.read(descriptor, SECRET_BYTES - len(secret))
        if not more:
            raise EOFError("the process that started this rank has ended")
        secret += more
    return secret


def dump_and_kill(process: RankProcess) -> None:
    """Let it print its stacks, if it still can, and end it: the others wait for it no longer."""
    process.send_signal(signal.SIGUSR1)
    time.sleep(_DUMP_SECONDS)
    process.kill()


def end_ranks(processes: Sequence[RankProcess]) -> None:
    """End followers, by force if they do not react."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
