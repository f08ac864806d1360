"""Ranks of a group that join rank 0 over the network, as those of another host do."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from loraplex.engine.process.engine_process import engine_environment
from loraplex.engine.ranks.group_secret import secret_of_file
from loraplex.engine.ranks.host_ranks import HostRanks, Membership
from loraplex.engine.shards.rank_address import RankAddress
from support.server import free_port

HOST = "127.0.0.1"


@dataclass(frozen=True)
class OtherHost:
    """How rank 0 and the ranks of the other host find each other."""

    port: int
    """Where rank 0 listens."""
    secret: Path

    def settings(self, num_local: int) -> dict[str, Any]:
        """Of rank 0's EngineConfig."""
        return {
            "num_local_ranks": num_local,
            "rank_address": f"{HOST}:{self.port}",
            "rank_secret": str(self.secret),
        }

    @contextmanager
    def running(self, ranks: Sequence[int], *, port: int | None = None) -> Iterator[None]:
        """Ranks of the other host. `port`: where they join, if not at rank 0's."""
        membership = Membership(RankAddress(HOST, port or self.port), secret_of_file(self.secret))
        ran = HostRanks(ranks, lambda: membership, engine_environment(os.environ))
        thread = Thread(target=ran.run)
        thread.start()
        try:
            yield
        finally:
            ran.stop()
            thread.join()


def other_host(folder: Path) -> OtherHost:
    """One that has no ranks yet. `folder`: takes the file with the secret."""
    secret = folder / "rank.secret"
    secret.write_text(secrets.token_hex(32))
    return OtherHost(free_port(), secret)


def pids_of_ranks(port: int) -> list[int]:
    """The processes that join rank 0 at this port."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if b"loraplex.engine.ranks.main" in words and f"{HOST}:{port}".encode() in words:
                found.append(int(entry.name))
    return found
