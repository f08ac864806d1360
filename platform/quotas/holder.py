"""Whose a limit or a budget is: the tenant's, or that of one of its users or keys.

A holder is text, as the tables have it: `tenant`, `user:ID` or `key:ID`.
"""

from __future__ import annotations

from ..base import ID_LENGTH

Holder = str

TENANT: Holder = "tenant"
_USER = "user:"
_KEY = "key:"
MAX_HOLDER_LENGTH = len(_USER) + ID_LENGTH


def user_holder(user_id: str) -> Holder:
    """The holder of a user's limits and budgets."""
    return f"{_USER}{user_id}"


def key_holder(key_id: str) -> Holder:
    """The holder of a key's limits and budgets."""
    return f"{_KEY}{key_id}"


def callers_of(user_id: str | None, key_id: str | None) -> tuple[Holder, ...]:
    """The user and the key of a request, as far as it has them."""
    user = () if user_id is None else (user_holder(user_id),)
    key = () if key_id is None else (key_holder(key_id),)
    return (*user, *key)


def payers_of(user_id: str | None, key_id: str | None) -> tuple[Holder, ...]:
    """Whose budgets of money a request or a job of this user and key is charged to."""
    return (TENANT, *callers_of(user_id, key_id))


def id_of(holder: Holder) -> tuple[str | None, str | None]:
    """The ids of the user and of the key that it is; None for what it is not."""
    user_id = holder.removeprefix(_USER) if holder.startswith(_USER) else None
    key_id = holder.removeprefix(_KEY) if holder.startswith(_KEY) else None
    return user_id, key_id


def possessive(holder: Holder) -> str:
    """Whose it is, for a message to a caller."""
    if holder == TENANT:
        return "the tenant's"
    return "the user's" if holder.startswith(_USER) else "the key's"
