"""Answers of the API as the types that the server writes them with (`api/schemas/`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from .errors import UnexpectedAnswer

View = TypeVar("View")


def as_view(answer: Any, view: type[View]) -> View:
    """The answer as an object of this schema; fields that the schema does not have are left out.

    Raises UnexpectedAnswer if the answer lacks a field: the server is of another version.
    """
    return as_views((answer,), view)[0]


def as_views(answers: Iterable[Any], view: type[View]) -> list[View]:
    """Each answer as in `as_view`."""
    schema = TypeAdapter(view)
    try:
        return [schema.validate_python(answer) for answer in answers]
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise UnexpectedAnswer(
            f"The server's answer is not a {view.__name__} of this client ({field}: "
            f"{first['msg']}). Install the client in the server's version."
        ) from exc
