"""Where the ranks of a replica's other stages join its rank 0, and their secret."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from ...engine.ranks.group_secret import secret_of_file
from ...engine.ranks.host_ranks import Membership
from ...engine.shards.rank_address import RankAddress, resolve
from ...engine.shards.rank_place import GroupShape


class StageRendezvous:
    """An address of rank 0's node and a new secret, which only this node's user can read."""

    def __init__(self, host: str, path: Path) -> None:
        """`path`: of the file with the secret, which is written."""
        self._address = RankAddress(host, _free_port(host))
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))

    @property
    def membership(self) -> Membership:
        """How to join. It crosses Ray's calls between actors, and Ray does not keep it."""
        return Membership(self._address, secret_of_file(self._path))

    def options(self, shape: GroupShape) -> Sequence[str]:
        """Those of `loraplex agent`, which runs the first stage's ranks."""
        return (
            *("--num-local-ranks", str(shape.ranks_per_stage)),
            *("--rank-address", str(self._address), "--rank-secret", str(self._path)),
        )


def _free_port(host: str) -> int:
    family, target = resolve(RankAddress(host, 0))
    with socket.create_server(target, family=family) as probe:
        port: int = probe.getsockname()[1]
    return port
