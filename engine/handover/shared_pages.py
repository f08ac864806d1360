"""Pages in memory that engines of one host share: files without a name (memfd), one per piece.

The receiver opens the file through `/proc` and empties it when it has read it, which frees the
memory and tells the sender so. A file that nobody reads is emptied after a while, and all of them
end with the sender's process, however it ends.

Only processes of the same user can open such a file, and only those that the links of the fleet,
with their certificates, have told where it is. The file begins with random bytes that the message
repeats, so a process that has the sender's number by chance is not mistaken for it.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

from ...adapters.identity import AdapterKey
from ..messages import PagesPlace, PrefixPiece
from .page_transport import PageTransport

MAX_UNREAD_BYTES = 64 << 20
"""Of an engine's pages that nobody has read yet. Beyond it, pieces travel in frames."""
UNREAD_SECONDS = 30.0
"""After this time a piece's receiver has been lost, or waits no longer."""
_NONCE_BYTES = 32

_log = logging.getLogger(__name__)


def memory_domain() -> str | None:
    """Engines with equal domains can open each other's files: they have the host, its processes'
    numbers and the user in common. None: this host has no such files."""
    if sys.platform != "linux":
        return None
    try:
        parts = (
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            os.readlink("/proc/self/ns/pid"),
            os.readlink("/proc/self/ns/user"),
            str(os.geteuid()),
        )
    except OSError:
        return None
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Unread:
    """A file that its receiver has not emptied yet."""

    descriptor: int
    num_bytes: int
    adapter: AdapterKey | None
    sent_at: float


class SharedPages(PageTransport):
    """The files of one engine, and those of others that it reads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unread: list[_Unread] = []

    def send(self, piece: PrefixPiece, adapter: AdapterKey | None) -> PrefixPiece:
        """See `PageTransport`. The pages stay in the message if there is no room for them."""
        sizes = [[len(page) for page in group.pages] for group in piece.groups]
        num_bytes = _NONCE_BYTES + sum(map(sum, sizes))
        self.poll()
        if not piece.groups or self.num_unread_bytes + num_bytes > MAX_UNREAD_BYTES:
            return piece
        nonce = secrets.token_bytes(_NONCE_BYTES)
        pages = [page for group in piece.groups for page in group.pages]
        try:
            descriptor = _write_file([nonce, *pages])
        except OSError:
            _log.warning("pages_not_shared", exc_info=True)
            return piece
        self._unread.append(_Unread(descriptor, num_bytes, adapter, self._clock()))
        return replace(
            piece,
            groups=[replace(group, pages=[]) for group in piece.groups],
            place=PagesPlace(os.getpid(), descriptor, nonce, sizes),
        )

    def receive(self, piece: PrefixPiece) -> PrefixPiece:
        """See `PageTransport`."""
        assert piece.place is not None
        try:
            pages = _take_pages(piece.place, len(piece.groups))
        except OSError as exc:
            _log.warning(
                "pages_not_received", extra={"request_id": piece.request_id, "error": str(exc)}
            )
            return replace(piece, groups=[], place=None)
        groups = [replace(group, pages=own) for group, own in zip(piece.groups, pages, strict=True)]
        return replace(piece, groups=groups, place=None)

    @property
    def num_unread_bytes(self) -> int:
        """What the files hold, as far as `poll` has seen."""
        return sum(each.num_bytes for each in self._unread)

    def forget(self, key: AdapterKey) -> None:
        """See `PageTransport`."""
        self._empty(lambda each: each.adapter is not None and each.adapter.has_part(key))

    def poll(self) -> bool:
        """See `PageTransport`."""
        if self._unread:
            oldest = self._clock() - UNREAD_SECONDS
            self._empty(lambda each: each.sent_at <= oldest or not _size_of(each.descriptor))
        return bool(self._unread)

    def close(self) -> None:
        """See `PageTransport`."""
        self._empty(lambda each: True)

    def _empty(self, is_over: Callable[[_Unread], bool]) -> None:
        kept = []
        for each in self._unread:
            if is_over(each):
                os.ftruncate(each.descriptor, 0)  # the receiver may have it open
                os.close(each.descriptor)
            else:
                kept.append(each)
        self._unread = kept


def _write_file(parts: Sequence[bytes]) -> int:
    """The descriptor of a new file with this content. Raises OSError."""
    descriptor = os.memfd_create("pages")
    try:
        with os.fdopen(descriptor, "wb", buffering=0, closefd=False) as file:
            for part in parts:
                if file.write(part) != len(part):
                    raise OSError("the memory is full")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _take_pages(place: PagesPlace, num_groups: int) -> list[list[bytes]]:
    """The pages by group, which are not there any more afterwards. Raises OSError."""
    if len(place.sizes) != num_groups:
        raise OSError("the groups are others")
    # A number that means something else now may stand for a pipe: opening it must not wait.
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(f"/proc/{place.process_id}/fd/{place.descriptor}", flags)
    try:
        return _read_pages(descriptor, place)
    finally:
        os.close(descriptor)


def _read_pages(descriptor: int, place: PagesPlace) -> list[list[bytes]]:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError("it is no file")
    nonce = os.pread(descriptor, _NONCE_BYTES, 0)
    if not hmac.compare_digest(nonce, place.nonce):
        raise OSError("the pages are not there any more")
    sizes = [size for group in place.sizes for size in group]
    if min(sizes, default=0) < 0 or _NONCE_BYTES + sum(sizes) != _size_of(descriptor):
        raise OSError("the sizes are others")
    offsets = accumulate(sizes, initial=_NONCE_BYTES)
    pages = iter([os.pread(descriptor, size, at) for size, at in zip(sizes, offsets, strict=False)])
    with suppress(OSError):  # it is free in any case when its time is over
        os.ftruncate(descriptor, 0)
    return [[next(pages) for _ in group] for group in place.sizes]


def _size_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_size
