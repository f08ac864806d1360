"""Counts failed sign-ins by name and by address, whether or not the name exists."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import delete, select

from ..locked_rows import lock_or_add
from ..networks import Address
from ..secrets import derive_key
from ..sessions import PlatformSession
from .models import SignInFailures

MAX_FAILURES = 5
WINDOW = timedelta(minutes=15)
"""The period in which failures are counted, and the duration of the lock."""
IPV6_PREFIX = 64
"""The smallest network that one caller has: it can use any number of addresses in it."""


class Subjects:
    """The subjects by which failures are counted. They are keyed hashes, because people type
    passwords into name fields."""

    def __init__(self, secret: bytes) -> None:
        self._key = derive_key(secret, "sign-in-subject")

    def of(self, name: str, tenant_slug: str | None, address: Address | None) -> list[str]:
        """The subjects of one attempt: the named account, and the client's address."""
        account = self._hash("account", tenant_slug or "", name.lower())
        return [account, *([] if address is None else [self._hash("address", _network(address))])]

    def of_session(self, account_id: str) -> list[str]:
        """For a signed-in user who confirms the password: other callers cannot lock it."""
        return [self._hash("session", account_id)]

    def _hash(self, *parts: str) -> str:
        return hmac.new(self._key, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def locked_until(
    session: PlatformSession, subjects: Iterable[str], now: datetime
) -> datetime | None:
    """Until when one of them may not try; None if they may."""
    query = select(SignInFailures.locked_until).where(
        SignInFailures.subject.in_(list(subjects)), SignInFailures.locked_until > now
    )
    return max((moment for moment in session.scalars(query) if moment is not None), default=None)


def note_failure(session: PlatformSession, subjects: Iterable[str], now: datetime) -> None:
    """Count a failure of each; the last of too many locks."""
    for subject in sorted(subjects):
        row = lock_or_add(session, SignInFailures(subject=subject, num_failures=0, began_at=now))
        if not row.began_at <= now < row.began_at + WINDOW:
            row.num_failures, row.began_at, row.locked_until = 0, now, None
        row.num_failures += 1
        if row.num_failures >= MAX_FAILURES:
            row.locked_until = now + WINDOW
        session.flush()


def forget(session: PlatformSession, subject: str) -> None:
    """Reset the count after a correct password."""
    row = session.get(SignInFailures, subject, with_for_update=True)
    if row is not None:
        session.delete(row)


def purge(session: PlatformSession, now: datetime) -> int:
    """Delete the counts that neither lock nor count any more; returns how many."""
    forgotten = session.execute(
        delete(SignInFailures)
        .where(SignInFailures.began_at < now - 2 * WINDOW)
        .returning(SignInFailures.subject)
    )
    return len(forgotten.all())


def _network(address: Address) -> str:
    if address.version == 4:
        return str(address)
    return (int(address) >> (128 - IPV6_PREFIX)).to_bytes(IPV6_PREFIX // 8).hex()
