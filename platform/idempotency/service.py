"""Returns the stored response of a repeated request without executing it again.

Stored responses are encrypted, because one may contain an API key that is shown once. If the first
request got no response because its server stopped or the database was unavailable, the audit log
decides, which is written with each change: a request that changed something is never executed
again; any other may be. The audit log does not show a change whose transaction is still open, so
that transaction locks the key (`hold`), and a repetition waits for it. If the repetition takes the
key first, the transaction is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, func, inspect, select

from ..audit.repository import list_audited_requests
from ..base import utc_now
from ..errors import IdempotencyConflict, IdempotencyInProgress, IdempotentAnswerLost
from ..locked_rows import lock_or_add
from ..sealing import Seal
from ..secrets import IDEMPOTENCY_KEY
from ..sessions import PlatformSession
from .models import IdempotentAnswer

KEPT_FOR = timedelta(hours=24)
LOCK_TIMEOUT_MS = 1000
"""How long a repetition waits for a transaction of the first request (PostgreSQL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedRequest:
    """A request under an `Idempotency-Key`."""

    owner: str
    """The id of the API key or session: another one of the same user may be allowed less."""
    key: str
    request_hash: bytes
    request_id: str


class IdempotentAnswers:
    """Keeps answers, encrypted under a key of the server's secret."""

    def __init__(self, secrets: Sequence[bytes], server_id: str) -> None:
        """`secrets`: the server's, the present one first; with the others answers are read."""
        self._seal = Seal(secrets, IDEMPOTENCY_KEY)
        self._server_id = server_id
        self._running: set[str] = set()

    @contextmanager
    def running(self, request: KeyedRequest) -> Iterator[None]:
        """This server executes the request; if it stops, no other server finishes it."""
        self._running.add(request.request_id)
        try:
            yield
        finally:
            self._running.discard(request.request_id)

    def begin(self, session: PlatformSession, request: KeyedRequest) -> tuple[int, bytes] | None:
        """Take the key for this request, which is `running`; or the kept status and answer.

        Raises IdempotencyConflict, IdempotencyInProgress or IdempotentAnswerLost, and DatabaseBusy
        while a transaction of the first request is open.
        """
        _limit_wait(session)
        row = lock_or_add(session, self._new_row(request))
        if row.created_at < utc_now() - KEPT_FOR:
            session.delete(row)
            session.flush()
            row = lock_or_add(session, self._new_row(request))
        if row.request_id == request.request_id:
            return None
        if row.request_hash != request.request_hash:
            raise IdempotencyConflict
        if self._is_abandoned(row):
            _settle(session, [row])
            session.flush()
            if inspect(row).deleted:
                session.add(self._new_row(request))
                return None
        if row.status is None:
            raise IdempotencyInProgress
        return row.status, self._open(row)

    def finish(
        self, session: PlatformSession, request: KeyedRequest, status: int, answer: bytes
    ) -> None:
        """Store the response for repetitions."""
        row = _row_of(session, request)
        if row is None:
            return
        row.status = status
        row.answer = self._seal.close(answer, _context(row))

    def give_up(self, session: PlatformSession, request: KeyedRequest) -> None:
        """The request has no response to store, so it may be repeated."""
        row = _row_of(session, request)
        if row is not None:
            _settle(session, [row])

    def recover(self, session: PlatformSession) -> None:
        """Settle the requests that this server had not answered when it stopped.

        One whose transaction is still open is settled by its repetition.
        """
        mine = (
            select(IdempotentAnswer)
            .where(IdempotentAnswer.server_id == self._server_id, IdempotentAnswer.status.is_(None))
            .order_by(IdempotentAnswer.owner, IdempotentAnswer.key)
            .with_for_update(skip_locked=True)
        )
        _settle(session, list(session.scalars(mine)))

    def _is_abandoned(self, row: IdempotentAnswer) -> bool:
        is_ours = row.server_id == self._server_id
        return row.status is None and is_ours and row.request_id not in self._running

    def _new_row(self, request: KeyedRequest) -> IdempotentAnswer:
        return IdempotentAnswer(
            owner=request.owner,
            key=request.key,
            request_hash=request.request_hash,
            request_id=request.request_id,
            server_id=self._server_id,
            created_at=utc_now(),
        )

    def _open(self, row: IdempotentAnswer) -> bytes:
        if row.answer is None:
            raise IdempotentAnswerLost
        answer = self._seal.open(row.answer, _context(row))
        if answer is None:  # the secret with which it was encrypted is gone
            raise IdempotentAnswerLost
        return answer


def hold(connection: Connection, request: KeyedRequest) -> None:
    """Lock the key for this request until the transaction ends: the guard of its changes.

    Raises IdempotencyInProgress if the request no longer has the key: it was given up, and may be
    running again.
    """
    row = select(IdempotentAnswer.request_id).where(
        IdempotentAnswer.owner == request.owner, IdempotentAnswer.key == request.key
    )
    if connection.execute(row.with_for_update()).scalar() != request.request_id:
        raise IdempotencyInProgress


def purge(session: PlatformSession, *, now: datetime | None = None) -> int:
    """Delete expired responses; returns how many."""
    oldest = (now or utc_now()) - KEPT_FOR
    forgotten = session.execute(
        delete(IdempotentAnswer)
        .where(IdempotentAnswer.created_at < oldest)
        .returning(IdempotentAnswer.key)
    )
    return len(forgotten.all())


def _limit_wait(session: PlatformSession) -> None:
    """Repetitions of a request whose commit hangs must not block all threads."""
    if session.dialect == "postgresql":
        session.execute(select(func.set_config("lock_timeout", f"{LOCK_TIMEOUT_MS}ms", True)))


def _row_of(session: PlatformSession, request: KeyedRequest) -> IdempotentAnswer | None:
    """The request's row; None if the key was used for another request meanwhile, or has expired."""
    key = (request.owner, request.key)
    row = session.get(IdempotentAnswer, key, with_for_update=True)
    return row if row is not None and row.request_id == request.request_id else None


def _settle(session: PlatformSession, rows: list[IdempotentAnswer]) -> None:
    """Allow repetitions of the requests that changed nothing; the responses of the others are
    lost."""
    done = list_audited_requests(session, {row.request_id for row in rows})
    for row in rows:
        if row.request_id in done:
            row.status = 0
        else:
            session.delete(row)


def _context(row: IdempotentAnswer) -> bytes:
    """The data to which a stored response is bound: with another key it cannot be decrypted."""
    return b"\0".join((row.owner.encode(), row.key.encode(), row.request_hash))
