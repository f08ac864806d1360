"""The fetcher process: `python -m loraplex.adapters.fetcher_process`.

Only this process has the store's credentials, and it owns the disk cache. Standard input is a
socket to the server (see `fetcher_messages`). When the socket closes, the process ends. The first
message says what to open. Transfers and the server's store calls run in separate threads, so pushes
and loads do not wait for each other. Tenants take turns at both.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Never

from .disk_cache import DiskCache
from .disk_room import DiskRoom
from .errors import AdapterError, AdapterUnavailable
from .fetcher import FetchedBlock, Fetcher
from .fetcher_messages import (
    INVALID_STORE,
    NO_CALL,
    Counted,
    Delete,
    Done,
    Exists,
    Failed,
    Fetch,
    Fetched,
    FetchFile,
    Forget,
    FromFetcher,
    Listed,
    ListPage,
    Note,
    NoteRead,
    Open,
    PutFile,
    Ready,
    RemoveAbandoned,
    Sent,
    ToFetcher,
    Trim,
    as_failure,
    decode_to_fetcher,
    encode,
    read_path,
)
from .json_frames import Inbox, MessageRefused
from .logs import log_to_stderr
from .malloc import return_freed_memory, share_arena
from .store import ObjectStore, adapter_key, open_store
from .tenant_threads import TenantThreads

NUM_STORE_THREADS = 8
NUM_REMOVAL_THREADS = 2
HEARTBEAT_SECONDS = 2.0
BEATS_PER_RETURN = 30
"""Freed memory is returned after this many heartbeats: about every minute."""
PROGRESS_BYTES = 4 << 20
"""Progress is reported at intervals of this many bytes."""
RECEIVE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("loraplex.adapters.fetcher_process")  # its own name is "__main__"


class Connection:
    """The socket to the server: any thread sends, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._inbox = Inbox()
        self._arrived: list[bytes] = []

    def send(self, message: FromFetcher) -> None:
        """Send a complete message; end this process if the peer is gone."""
        try:
            with self._lock:
                self._socket.sendall(encode(message))
        except OSError:
            os._exit(0)

    def receive(self) -> ToFetcher:
        """The next message; ends this process if the server is gone."""
        while not self._arrived:
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                os._exit(0)
            self._arrived.extend(self._inbox.take(data))
        return decode_to_fetcher(self._arrived.pop(0))


class FetcherService:
    """Answers the server's calls."""

    def __init__(
        self,
        connection: Connection,
        *,
        store: ObjectStore,
        disk_cache: DiskCache,
        transfer_seconds: float,
    ) -> None:
        self._connection = connection
        self._store = store
        self._disk_cache = disk_cache
        self._fetcher = Fetcher(store, disk_cache, deadline_seconds=transfer_seconds)
        self._threads = TenantThreads("store", NUM_STORE_THREADS)
        # Callers hold locks in the database meanwhile, so removals do not wait for transfers.
        self._removal_threads = TenantThreads("removals", NUM_REMOVAL_THREADS)

    def serve(self) -> Never:
        """Until the server ends this process."""
        threading.Thread(target=self._beat, daemon=True).start()
        self._connection.send(Ready(NO_CALL))
        while True:
            self._take(self._connection.receive())

    def _take(self, message: ToFetcher) -> None:
        match message:
            case Fetch(call_id, key, sha256, size_bytes):
                flight = self._fetcher.fetch(key, sha256=sha256, size_bytes=size_bytes)
                flight.add_done_callback(lambda done: self._answer_fetch(call_id, done))
            case NoteRead(_, key):
                self._fetcher.note_read(key)
            case Open():
                raise MessageRefused("the store is open already")
            case _:
                call = partial(self._call, message)
                threads = self._removal_threads if isinstance(message, Delete) else self._threads
                threads.submit(_tenant_of(message), self._answer, message.call_id, call)

    def _answer_fetch(self, call_id: int, flight: Future[FetchedBlock]) -> None:
        self._answer(call_id, lambda: _as_fetched(call_id, flight.result()))

    def _answer(self, call_id: int, call: Callable[[], FromFetcher]) -> None:
        try:
            answer = call()
        except (AdapterError, OSError) as exc:
            answer = as_failure(call_id, exc)
        except Exception:  # every call is answered, or its caller would wait for ever
            _log.exception("fetcher_call_failed")
            answer = Failed(call_id, AdapterUnavailable.code, "the fetcher failed")
        self._note()
        self._connection.send(answer)

    def _call(self, message: ToFetcher) -> FromFetcher:
        call_id = message.call_id
        match message:
            case Forget(_, key):
                self._fetcher.forget(key)
                gc.collect()  # also frees the memory of a failed transfer
            case Trim(_, num_bytes, keep_bytes):
                return Counted(call_id, self._disk_cache.trim(num_bytes, keep_bytes=keep_bytes))
            case PutFile(_, key, path, sha256):
                progress = _Progress(self._connection, call_id)
                self._store.put_file(key, Path(path), sha256=sha256, on_progress=progress.report)
            case FetchFile(_, key, path, sha256, size_bytes, seconds):
                deadline = None if seconds is None else time.monotonic() + seconds
                self._store.fetch_file(
                    key, Path(path), sha256=sha256, size_bytes=size_bytes, deadline=deadline
                )
            case Delete(_, key):
                self._store.delete(key)
            case Exists(_, key):
                return Counted(call_id, int(self._store.exists(key)))
            case ListPage(_, prefix, after, max_objects):
                objects = self._store.list_keys(prefix, after=after)
                return Listed(call_id, list(islice(objects, max_objects)))
            case RemoveAbandoned(_, older_than_seconds):
                removed = self._store.remove_abandoned(older_than_seconds=older_than_seconds)
                return Counted(call_id, removed)
        return Done(call_id)

    def _beat(self) -> None:
        for beat in count(1):
            self._note()
            if beat % BEATS_PER_RETURN == 0:
                return_freed_memory()
            time.sleep(HEARTBEAT_SECONDS)

    def _note(self) -> None:
        self._connection.send(Note(NO_CALL, self._disk_cache.stats))


class _Progress:
    """Tells the server of an upload's progress, not of every chunk."""

    def __init__(self, connection: Connection, call_id: int) -> None:
        self._connection = connection
        self._call_id = call_id
        self._told_bytes = 0

    def report(self, sent_bytes: int) -> None:
        if sent_bytes - self._told_bytes >= PROGRESS_BYTES:
            self._told_bytes = sent_bytes
            self._connection.send(Sent(self._call_id, sent_bytes))


def _tenant_of(message: ToFetcher) -> str | None:
    """The tenant of the call's object; None: the server's own upkeep."""
    match message:
        case Forget():
            return message.key.tenant_id
        case PutFile() | FetchFile() | Delete() | Exists():
            key = adapter_key(message.key)
            return None if key is None else key.tenant_id
        case _:
            return None


def _as_fetched(call_id: int, block: FetchedBlock) -> Fetched:
    return Fetched(call_id, read_path(block.path), block.tier, block.seconds)


def main() -> Never:
    """Serve the socket on standard input."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    log_to_stderr()
    share_arena()
    _end_with_parent()
    connection = Connection(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    try:
        _open(connection).serve()
    except MessageRefused:
        _log.exception("fetcher_message_not_understood")
        os._exit(1)


def _open(connection: Connection) -> FetcherService:
    """Open what the first message describes; end this process if that fails."""
    message = connection.receive()
    if not isinstance(message, Open):
        raise MessageRefused(f"{type(message).__name__} came before Open")
    try:
        return FetcherService(
            connection,
            store=open_store(
                message.store_url,
                reserve_bytes=message.reserve_bytes,
                reserve_file=_reserve_file(message),
            ),
            disk_cache=_open_cache(message),
            transfer_seconds=message.transfer_seconds,
        )
    except ValueError as exc:
        failure = Failed(message.call_id, INVALID_STORE, str(exc))
    except AdapterError as exc:
        failure = as_failure(message.call_id, exc)
    except OSError as exc:
        failure = Failed(
            message.call_id, AdapterUnavailable.code, f"the adapter cache cannot be used: {exc}"
        )
    connection.send(failure)
    os._exit(1)


def _reserve_file(message: Open) -> Path | None:
    return None if message.reserve_file is None else Path(message.reserve_file)


def _open_cache(message: Open) -> DiskCache:
    """Raises OSError."""
    directory = Path(message.cache_directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    room = DiskRoom(directory, message.reserve_bytes, reserve_file=_reserve_file(message))
    return DiskCache(directory, message.capacity_bytes, free_bytes=lambda _: room.free_bytes)


def _end_with_parent() -> None:
    """End this process immediately when the parent dies, even if it is stuck in native code."""
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the group: the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit(_signal: int, _frame: FrameType | None) -> Never:
    os._exit(0)


if __name__ == "__main__":
    main()
