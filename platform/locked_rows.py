"""Gets a row with a lock, and creates it if it does not exist."""

from __future__ import annotations

from typing import TypeVar

from sqlalchemy import inspect
from sqlalchemy.exc import IntegrityError

from .base import Base
from .sessions import UnitOfWork

Row = TypeVar("Row", bound=Base)


def lock_or_add(session: UnitOfWork, new: Row) -> Row:
    """The row with the primary key of `new`, or `new` itself if there is none yet.

    It is locked against other writers until the unit of work ends. Of several concurrent callers
    one adds the row, and the others wait for that one to finish.
    """
    mapper = inspect(type(new))
    identity = tuple(mapper.primary_key_from_instance(new))
    row = session.get(type(new), identity, with_for_update=True)
    if row is not None:
        return row
    try:
        with session.begin_nested():
            session.add(new)
        return new
    except IntegrityError:
        row = session.get(type(new), identity, with_for_update=True)
        if row is None:
            raise
        return row
