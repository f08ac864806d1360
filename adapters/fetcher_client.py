"""The server's client of the fetcher process: starts it, calls it, and restarts it if it dies.

The store's credentials are passed to this client and given only to that process. The client keeps
them to restart the process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from .disk_cache import DiskCacheStats
from .errors import StoreUnavailable
from .fetcher import TRANSFER_SECONDS, FetchedBlock
from .fetcher_messages import (
    NO_CALL,
    Counted,
    Delete,
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
    decode_from_fetcher,
    encode,
    read_path,
)
from .identity import AdapterKey
from .json_frames import Inbox, MessageRefused
from .niceness import yield_processor
from .store import ObjectStore, StoredObject
from .store.base import OnProgress, check_key, check_prefix

# -P: do not import from the working directory.
FETCHER_COMMAND = (sys.executable, "-P", "-m", "loraplex.adapters.fetcher_process")
START_SECONDS = 120.0
STALL_SECONDS = 30.0
"""A process without heartbeats for this long is ended."""
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 15.0
GOOD_LIFE_SECONDS = 60.0
"""After a process has run for this long, the restart delays start over."""
PAGE_OBJECTS = 500
_RECEIVE_BYTES = 1 << 16
_STDERR = 2

_log = logging.getLogger(__name__)


class FetcherStats(NamedTuple):
    """Counters of this client's fetcher processes, and the present contents of the disk cache."""

    disk: DiskCacheStats = DiskCacheStats()
    num_restarts: int = 0


@dataclass(slots=True)
class _Call:
    """A call that was sent: its future, and the receiver of its progress."""

    outcome: Future[FromFetcher] = field(default_factory=Future)
    on_progress: OnProgress | None = None


class _Outbox:
    """The queue of messages to the process: putting never blocks, and a thread sends in order."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="fetcher-outbox", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        self._queue.put(data)

    def close(self) -> None:
        """Wait for the end of the thread; the peer must have exited."""
        self._queue.put(None)
        self._thread.join()

    def _send(self) -> None:
        with contextlib.suppress(
            OSError
        ):  # the process has ended, which the reader of the socket reports
            while (data := self._queue.get()) is not None:
                self._socket.sendall(data)


class FetcherClient:
    """Runs the fetcher process. Thread-safe. Only `start`, `close`, `forget`, `trim` and the
    store's methods block.

    While there is no process, every call fails with StoreUnavailable, and so do the calls that were
    running when it died.
    """

    def __init__(
        self,
        *,
        store_url: str,
        cache_directory: Path,
        capacity_bytes: int,
        environment: Mapping[str, str],
        reserve_bytes: int | None = None,
        reserve_file: Path | None = None,
        command: Sequence[str] = FETCHER_COMMAND,
        stall_seconds: float = STALL_SECONDS,
        transfer_seconds: float = TRANSFER_SECONDS,
    ) -> None:
        """`environment`: the complete environment of the process, including the store's
        credentials. `reserve_bytes` and `reserve_file` are for `DiskRoom`. `transfer_seconds`: the
        limit for the transfer of one block."""
        self._open = Open(
            NO_CALL,
            store_url,
            read_path(cache_directory),
            capacity_bytes,
            reserve_bytes,
            None if reserve_file is None else read_path(reserve_file),
            transfer_seconds,
        )
        self._environment = dict(environment)
        self._command = command
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._outbox: _Outbox | None = None
        """The connection to the ready process; None while there is none."""
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count(NO_CALL + 1)
        self._started: Future[None] = Future()
        self._closing = threading.Event()
        self._past = DiskCacheStats()
        """Counters of the processes that have ended."""
        self._present = DiskCacheStats()
        self._num_restarts = 0
        # One thread for all processes: the kernel ends a child when the thread that started it
        # ends.
        self._thread = threading.Thread(target=self._keep_alive, name="fetcher-client", daemon=True)
        self.store: ObjectStore = RemoteStore(self)

    def start(self) -> None:
        """Start the process and wait until it serves.

        Raises ValueError if the store's URL is malformed, or the AdapterError for which store or
        cache cannot be opened.
        """
        self._thread.start()
        try:
            self._started.result(START_SECONDS)
        except TimeoutError:
            self.close()
            raise StoreUnavailable("the fetcher process did not start in time") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; running calls fail with StoreUnavailable."""
        self._closing.set()
        self._kill()
        if self._thread.is_alive():
            self._thread.join()

    def fetch(self, key: AdapterKey, *, sha256: str, size_bytes: int) -> Future[FetchedBlock]:
        """Like `Fetcher.fetch`, in the other process."""
        waiter: Future[FetchedBlock] = Future()
        call = self.send(lambda call_id: Fetch(call_id, key, sha256, size_bytes))
        call.add_done_callback(lambda done: _pass_block_on(done, waiter))
        return waiter

    def note_read(self, key: AdapterKey) -> None:
        """Like `Fetcher.note_read`; a process that is starting has no readers."""
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(encode(NoteRead(NO_CALL, key)))

    def forget(self, key: AdapterKey) -> None:
        """Like `Fetcher.forget`; complete when this returns. Raises StoreUnavailable."""
        self.send(lambda call_id: Forget(call_id, key)).result()

    def trim(self, num_bytes: int, *, keep_bytes: int) -> int:
        """Like `DiskCache.trim`; waits for it. Raises StoreUnavailable."""
        answer = self.send(lambda call_id: Trim(call_id, num_bytes, keep_bytes)).result()
        assert isinstance(answer, Counted), answer
        return answer.number

    def stats(self) -> FetcherStats:
        """As of the last heartbeat; does not block."""
        with self._lock:
            past, present = self._past, self._present
            return FetcherStats(_added(past, present), self._num_restarts)

    @property
    def pid(self) -> int | None:
        """The process id of the ready process; None while there is none."""
        with self._lock:
            return self._process.pid if self._process and self._outbox else None

    def send(
        self, make: Callable[[int], ToFetcher], on_progress: OnProgress | None = None
    ) -> Future[FromFetcher]:
        """Send the call that `make` builds from its number; returns the future of its answer.

        The future fails with the fetcher's error. `on_progress` is called from a thread that must
        not be blocked.
        """
        call = _Call(on_progress=on_progress)
        call_id = next(self._call_ids)
        data = encode(make(call_id))
        with self._lock:
            if self._outbox is None:
                call.outcome.set_exception(
                    StoreUnavailable(
                        "the process that reads and writes the store is starting; try again in a "
                        "moment"
                    )
                )
            else:
                self._calls[call_id] = call
                self._outbox.put(data)
        return call.outcome

    # --- inside -----------------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            began_at = time.monotonic()
            try:
                self._live()
            except Exception:  # the thread restarts the process after any failure
                _log.exception("fetcher_failed")
            if not self._started.done():
                self._started.set_exception(StoreUnavailable("the fetcher process did not start"))
            if self._started.exception() is not None:
                return
            if time.monotonic() - began_at >= GOOD_LIFE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            if self._closing.wait(pause):
                return
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
            with self._lock:
                self._num_restarts += 1

    def _live(self) -> None:
        """Run one process, from its start to its end."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=_STDERR,
                    env=self._environment,
                    # A new process group, so that a signal to the server's group does not reach it.
                    start_new_session=True,
                )
            yield_processor(process.pid)  # transfers can wait for the engine's steps
            with self._lock:
                self._process = process
            if self._closing.is_set():
                process.kill()
            try:
                ours.sendall(encode(self._open))
                self._receive(ours)
            except (OSError, MessageRefused) as exc:
                _log.warning("fetcher_connection_failed", extra={"error": str(exc)})
            finally:
                self._end_life(process)

    def _end_life(self, process: subprocess.Popen[bytes]) -> None:
        """Stop using the process and ensure that it has ended, because it owns the cache."""
        with self._lock:
            outbox, self._outbox = self._outbox, None
            self._process = None
            calls, self._calls = self._calls, {}
            self._past = _added(self._past, self._present)._replace(used_bytes=0)
            self._present = self._present._replace(
                num_hits=0, num_misses=0, num_evictions=0, num_corrupt=0
            )
        process.kill()
        status = process.wait()
        if outbox is not None:
            outbox.close()
        if not self._closing.is_set():
            _log.warning("fetcher_process_ended", extra={"status": status})
        for call in calls.values():
            _fail(call.outcome, StoreUnavailable("the fetcher process ended; ask again"))

    def _receive(self, connected: socket.socket) -> None:
        """Deliver every message until the process ends. Raises OSError without heartbeats."""
        inbox = Inbox()
        poll = select.poll()
        poll.register(connected, select.POLLIN)
        while True:
            if not poll.poll(self._stall_seconds * 1000):
                raise TimeoutError("no sign of life")
            data = connected.recv(_RECEIVE_BYTES)
            if not data:
                return
            for content in inbox.take(data):
                self._take(decode_from_fetcher(content), connected)

    def _take(self, message: FromFetcher, connected: socket.socket) -> None:
        match message:
            case Ready():
                with self._lock:
                    self._outbox = _Outbox(connected)
                if not self._started.done():
                    self._started.set_result(None)
            case Note(_, disk):
                with self._lock:
                    self._present = disk
            case Sent(call_id, num_bytes):
                call = self._calls.get(call_id)
                if call and call.on_progress:
                    call.on_progress(num_bytes)
            case Failed(call_id=0):
                if self._started.done():
                    _log.error("fetcher_not_opened", extra={"error": message.message})
                else:
                    self._started.set_exception(message.as_error())
            case _:
                with self._lock:
                    call = self._calls.pop(message.call_id, None)
                if call is not None:
                    _settle(call.outcome, message)

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()


class RemoteStore:
    """The object store, through the fetcher process. Every method blocks. See `ObjectStore`."""

    def __init__(self, client: FetcherClient) -> None:
        self._client = client

    def put_file(
        self, key: str, path: Path, *, sha256: str, on_progress: OnProgress | None = None
    ) -> None:
        check_key(key)
        size_bytes = path.stat().st_size
        self._client.send(
            lambda call_id: PutFile(call_id, key, read_path(path), sha256), on_progress
        ).result()
        if on_progress:
            on_progress(size_bytes)

    def fetch_file(
        self, key: str, path: Path, *, sha256: str, size_bytes: int, deadline: float | None = None
    ) -> None:
        check_key(key)
        seconds = None if deadline is None else deadline - time.monotonic()
        self._client.send(
            lambda call_id: FetchFile(call_id, key, read_path(path), sha256, size_bytes, seconds)
        ).result()

    def delete(self, key: str) -> None:
        check_key(key)
        self._client.send(lambda call_id: Delete(call_id, key)).result()

    def exists(self, key: str) -> bool:
        check_key(key)
        return self._count(lambda call_id: Exists(call_id, key)) > 0

    def list_keys(self, prefix: str, *, after: str = "") -> Iterator[StoredObject]:
        check_prefix(prefix)
        while page := self._page(prefix, after):
            yield from page
            if len(page) < PAGE_OBJECTS:
                return
            after = page[-1].key

    def remove_abandoned(self, *, older_than_seconds: float) -> int:
        return self._count(lambda call_id: RemoveAbandoned(call_id, older_than_seconds))

    def _page(self, prefix: str, after: str) -> list[StoredObject]:
        call = self._client.send(lambda call_id: ListPage(call_id, prefix, after, PAGE_OBJECTS))
        answer = call.result()
        assert isinstance(answer, Listed), answer
        return answer.objects

    def _count(self, make: Callable[[int], ToFetcher]) -> int:
        answer = self._client.send(make).result()
        assert isinstance(answer, Counted), answer
        return answer.number


def _added(past: DiskCacheStats, present: DiskCacheStats) -> DiskCacheStats:
    """Sum the counters; sizes are the current ones."""
    return DiskCacheStats(
        used_bytes=present.used_bytes,
        capacity_bytes=present.capacity_bytes,
        num_hits=past.num_hits + present.num_hits,
        num_misses=past.num_misses + present.num_misses,
        num_evictions=past.num_evictions + present.num_evictions,
        num_corrupt=past.num_corrupt + present.num_corrupt,
    )


def _settle(outcome: Future[FromFetcher], message: FromFetcher) -> None:
    if isinstance(message, Failed):
        _fail(outcome, message.as_error())
    elif outcome.set_running_or_notify_cancel():
        outcome.set_result(message)


def _fail(outcome: Future[FromFetcher], error: Exception) -> None:
    if outcome.set_running_or_notify_cancel():
        outcome.set_exception(error)


def _pass_block_on(call: Future[FromFetcher], waiter: Future[FetchedBlock]) -> None:
    """Set the result of a caller's fetch, unless the caller has cancelled it."""
    if not waiter.set_running_or_notify_cancel():
        return
    error = call.exception()
    if error is not None:
        waiter.set_exception(error)
        return
    answer = call.result()
    assert isinstance(answer, Fetched), answer
    waiter.set_result(FetchedBlock(Path(answer.path), answer.tier, answer.seconds))
