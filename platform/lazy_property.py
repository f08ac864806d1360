"""A property that is computed at its first use.

Python 3.11's `functools.cached_property` holds a lock of the class while it computes, so a thread
that waits for a row of the database would hold up the thread that has locked the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class lazy_property(Generic[Value]):  # it is used like `property`
    """Like `functools.cached_property`, for objects that one thread uses."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._name = compute.__name__

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> lazy_property[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> Value: ...
    def __get__(self, instance: object | None, owner: type[Any]) -> lazy_property[Value] | Value:
        if instance is None:
            return self
        value: Value = self._compute(instance)
        instance.__dict__[self._name] = value  # which Python finds first from now on
        return value
