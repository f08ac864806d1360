"""The listening socket at which the ranks of a group join rank 0. Torch-free.

It exists until all have joined. A stranger is refused and does not delay the others.
"""

from __future__ import annotations

import logging
import select
import socket
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Self

from ..errors import RankLost, RankRefused
from ..shards.rank_address import RankAddress, resolve
from .rank_handshake import RankLink, admit

JOIN_SECONDS = 120.0
"""The maximum time until all ranks have joined."""
DEAD_SECONDS = 8.0
"""A host that acknowledges nothing for so long has lost the connection."""
_NUM_HANDSHAKES = 32
"""At a time."""
_LOOK_SECONDS = 0.1

_log = logging.getLogger(__name__)


class RankListener:
    """Admits each wanted connection once."""

    def __init__(self, address: RankAddress, secret: bytes, wanted: Collection[RankLink]) -> None:
        """Listen; port 0: at any. Raises OSError."""
        self._secret = secret
        self._wanted = set(wanted)
        """What has not joined yet."""
        self._lock = Lock()
        self._joined: dict[RankLink, socket.socket] = {}
        self._num_refused = 0
        family, target = resolve(address)
        self._socket = socket.create_server(target, family=family, backlog=_NUM_HANDSHAKES)
        self._socket.settimeout(_LOOK_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Disconnect those that have joined a group that is not whole."""
        self._socket.close()
        for connected in self._joined.values():
            connected.close()

    @property
    def address(self) -> RankAddress:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return RankAddress(host, port)

    def admit_all(self, check: Callable[[], None]) -> dict[RankLink, socket.socket]:
        """The wanted connections, once all are there. Calls `check` meanwhile.

        Raises RankLost after JOIN_SECONDS or if one ends meanwhile, and what `check` raises.
        """
        ends_at, num_wanted = time.monotonic() + JOIN_SECONDS, len(self._wanted)
        handshakes = ThreadPoolExecutor(_NUM_HANDSHAKES)
        try:
            while len(self._joined) < num_wanted:
                check()
                self._check_joined()
                if time.monotonic() > ends_at:
                    raise RankLost(self._missing())
                self._accept(handshakes)
        finally:
            handshakes.shutdown(wait=False)  # a silent stranger's may last
        joined, self._joined = self._joined, {}
        return joined

    def _accept(self, handshakes: ThreadPoolExecutor) -> None:
        try:
            connected, peer = self._socket.accept()
        except TimeoutError:
            return
        handshakes.submit(self._admit, connected, str(peer[0]))

    def _admit(self, connected: socket.socket, peer: str) -> None:
        try:
            link = admit(connected, self._secret, self._take)
            set_options(connected)
        except (RankRefused, OSError, EOFError, ValueError) as exc:
            connected.close()
            self._num_refused += 1
            _log.warning("rank_refused", extra={"peer": peer, "error": str(exc)})
        else:
            self._joined[link] = connected

    def _take(self, link: RankLink) -> bool:
        """Whether this is wanted; only once."""
        with self._lock:
            is_wanted = link in self._wanted
            self._wanted.discard(link)
        return is_wanted

    def _check_joined(self) -> None:
        """Raises RankLost if one that has joined is gone: it could not join again."""
        for link, connected in list(self._joined.items()):
            poller = select.poll()
            poller.register(connected, select.POLLRDHUP)
            if poller.poll(0):
                raise RankLost(f"Rank {link.rank} ended before it had started.")

    def _missing(self) -> str:
        ranks = sorted({link.rank for link in self._wanted})
        names = ", ".join(f"rank {rank}" for rank in ranks)
        refused = f" {self._num_refused} connections were refused." if self._num_refused else ""
        return f"No {names} has joined at {self.address} within {JOIN_SECONDS:g} s.{refused}"


def set_options(connected: socket.socket) -> None:
    """Send small messages at once, and notice a host that is gone."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, int(DEAD_SECONDS / 2)),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_USER_TIMEOUT, int(DEAD_SECONDS * 1000)),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
