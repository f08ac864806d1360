"""The user or key in a path, as the holder of limits and budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

from fastapi import Depends

from ...platform.keys.principal import Principal, Scope
from ...platform.quotas.holder import Holder, key_holder, user_holder
from ...platform.sessions import TenantSession
from ...platform.users.service import get_user
from ..http.auth import require
from ..server.runtime import CurrentRuntime

KeyManager = Annotated[Principal, Depends(require(Scope.KEYS_MANAGE))]
UserManager = Annotated[Principal, Depends(require(Scope.USERS_MANAGE))]


class Caller(NamedTuple):
    """A user or key of the tenant of the one who manages it."""

    manager: Principal
    holder: Holder
    check: Callable[[TenantSession], object]
    """Raises KeyNotFound or UserNotFound."""


async def key_in_path(runtime: CurrentRuntime, principal: KeyManager, key_id: str) -> Caller:
    """The key that the path names."""
    keys = runtime.control_plane.keys
    return Caller(
        principal,
        key_holder(key_id),
        lambda session: keys.get(session, key_id, viewer=principal),
    )


async def user_in_path(principal: UserManager, user_id: str) -> Caller:
    """The user that the path names."""
    return Caller(principal, user_holder(user_id), lambda session: get_user(session, user_id))


KeyInPath = Annotated[Caller, Depends(key_in_path)]
UserInPath = Annotated[Caller, Depends(user_in_path)]
