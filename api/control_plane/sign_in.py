"""Sign-in at the console, and other operations that need a password.

Hashing a password takes 64 MiB and a tenth of a second, so few are hashed at once, and the limits
on failed attempts are checked immediately before each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ...platform.accounts import failures
from ...platform.accounts.passwords import Passwords
from ...platform.accounts.repository import Holder
from ...platform.accounts.service import OpenedSession, actor_of, party_of
from ...platform.audit.event import Changed, Event, Origin
from ...platform.base import utc_now
from ...platform.errors import SignInFailed, SignInLocked
from ...platform.keys.principal import AnyPrincipal, Principal
from ...platform.networks import Address
from ...platform.sessions import PlatformSession, UnitOfWork
from ..contract.errors import ApiError
from .control_plane import ControlPlane
from .threads import WorkerThreads

NUM_HASHING = 2
MAX_WAITING = 32
"""Waiting attempts: about three seconds of work."""


class SignIn:
    """One per server."""

    def __init__(
        self, control_plane: ControlPlane, secret: bytes, passwords: Passwords | None = None
    ) -> None:
        """`secret`: the server's current secret."""
        self._control_plane = control_plane
        self._passwords = passwords or Passwords()
        self._subjects = failures.Subjects(secret)
        self._threads = WorkerThreads("passwords", NUM_HASHING)
        self._places = asyncio.Semaphore(NUM_HASHING)
        self._num_waiting = 0

    async def aclose(self) -> None:
        await asyncio.to_thread(self._threads.close)

    async def open(
        self,
        name: str,
        tenant_slug: str | None,
        password: str,
        *,
        address: Address | None,
        request_id: str,
    ) -> OpenedSession:
        """Sign in. Raises SignInFailed, SignInLocked, TenantSuspended or ApiError.

        An unknown name fails like a wrong password, in the same time.
        """
        accounts = self._control_plane.accounts
        subjects = self._subjects.of(name, tenant_slug, address)

        holder = await self._control_plane.read_all_tenants(
            lambda session: accounts.find_account(session, name, tenant_slug)
        )
        try:
            async with self._attempt(subjects):
                await self._check(password, holder, subjects)
        except (SignInFailed, SignInLocked) as refusal:
            refusal.refused = party_of(holder)
            raise
        assert holder is not None, "a correct password has a holder"

        def sign_in(session: UnitOfWork) -> Changed[OpenedSession]:
            opened = accounts.open(session, holder)
            return Changed(opened, Event("session.create", holder.account.id))

        return await self._control_plane.change_own(
            holder.account.tenant_id, _origin(holder, address, request_id), sign_in
        )

    async def enrol(
        self, token: str, password: str, *, address: Address | None, request_id: str
    ) -> OpenedSession:
        """Set the password of the invitation's account, and sign in.

        Raises InvitationEnded, TenantSuspended or ApiError.
        """
        accounts = self._control_plane.accounts
        holder = await self._control_plane.read_all_tenants(
            lambda session: accounts.find_invited(session, token)
        )
        async with self._place():
            password_hash = await self._threads.run(self._passwords.hash, password)

        def set_password(session: UnitOfWork) -> Changed[OpenedSession]:
            accounts.enrol(session, token, password_hash)
            opened = accounts.open_enrolled(session, holder)
            return Changed(opened, Event("account.enrol", holder.account.id))

        opened = await self._control_plane.change_own(
            holder.account.tenant_id, _origin(holder, address, request_id), set_password
        )
        return opened

    async def confirm(
        self, caller: AnyPrincipal, token: str, password: str, origin: Origin
    ) -> None:
        """Note that the password was confirmed. Raises as `open`."""
        await self._check_own(caller, password, origin)
        accounts = self._control_plane.accounts

        def note(session: UnitOfWork) -> Changed[None]:
            accounts.confirm(session, token)
            return Changed(None, Event("session.confirm", _account_id(caller)))

        await self._control_plane.change_own(own_tenant_id(caller), origin, note)

    async def change_password(
        self, caller: AnyPrincipal, token: str, current: str, new: str, origin: Origin
    ) -> None:
        """Set another password; the account's other sessions end. Raises as `open`."""
        await self._check_own(caller, current, origin)
        async with self._place():
            password_hash = await self._threads.run(self._passwords.hash, new)
        accounts, account_id = self._control_plane.accounts, _account_id(caller)

        def change(session: UnitOfWork) -> Changed[None]:
            accounts.change_password(session, account_id, password_hash, keep=token)
            return Changed(None, Event("account.change", account_id, {"password": True}))

        await self._control_plane.change_own(own_tenant_id(caller), origin, change)

    async def _check_own(self, caller: AnyPrincipal, password: str, origin: Origin) -> None:
        """Raise unless this is the password of the signed-in account."""
        account_id = _account_id(caller)
        subjects = self._subjects.of_session(account_id)
        async with self._attempt(subjects):
            holder = await self._control_plane.read_all_tenants(
                lambda session: self._control_plane.accounts.get(session, account_id)
            )
            await self._check(password, holder, subjects)

    @asynccontextmanager
    async def _attempt(self, subjects: Sequence[str]) -> AsyncIterator[None]:
        """Reserve one of the concurrent hashes, if none of these names is locked. Raises
        SignInLocked, ApiError."""
        await self._check_unlocked(subjects)  # locked callers do not occupy a place
        async with self._place():
            await self._check_unlocked(subjects)
            yield

    async def _check_unlocked(self, subjects: Sequence[str]) -> None:
        now = utc_now()
        until = await self._control_plane.read_all_tenants(
            lambda session: failures.locked_until(session, subjects, now)
        )
        if until is not None:
            raise SignInLocked((until - now).total_seconds())

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._num_waiting >= MAX_WAITING:
            raise ApiError("overloaded")
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    async def _check(self, password: str, holder: Holder | None, subjects: Sequence[str]) -> None:
        """Compare, and count failures. Raises SignInFailed."""
        stored = None if holder is None else holder.account.password_hash
        is_right = await self._threads.run(self._passwords.is_password, password, stored)

        def count(session: PlatformSession) -> None:
            if is_right:
                failures.forget(session, subjects[0])
            else:
                failures.note_failure(session, subjects, utc_now())

        await self._control_plane.write_all_tenants(count)
        if not is_right:
            raise SignInFailed


def own_tenant_id(caller: AnyPrincipal) -> str | None:
    """The tenant whose log records the caller's actions on its own account; None: the platform's
    log."""
    if isinstance(caller, Principal) and caller.operator_role is None:
        return caller.tenant_id
    return None


def _account_id(caller: AnyPrincipal) -> str:
    assert caller.signed_in is not None, "the route requires a session"
    return caller.signed_in.account_id


def _origin(holder: Holder, address: Address | None, request_id: str) -> Origin:
    return Origin(actor_of(holder), request_id, None if address is None else str(address))
