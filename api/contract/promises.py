"""Declares a route's responses and errors, from which `openapi.py` generates the document.

    @router.get("/adapters/{name}")
    @answers(AdapterView, errors=("adapter_not_found",))
    async def get_adapter(...) -> Response:
        \"\"\"Summary. What follows is the description.\"\"\"

Dependencies declare what they read and which errors they raise, so a route declares only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .error_codes import ERROR_CODES
from .request_model import RequestModel

_PROMISE = "__loraplex_promise__"
_TERMS = "__loraplex_terms__"

Function = TypeVar("Function", bound=Callable[..., Any])


class Raw(tuple[str, ...]):
    """A body that is not a model as JSON: the media types that it may have."""

    def __new__(cls, *media_types: str) -> Raw:
        return super().__new__(cls, media_types)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A route's successful response and its own errors."""

    model: Any
    """An AnswerModel, Raw, or None for an answer without a body."""
    statuses: tuple[int, ...]
    errors: tuple[str, ...]
    stream: Any
    """The model of a stream's events; None if the route does not stream."""
    also: tuple[str, ...]
    """Other media types besides JSON that a client can request."""
    headers: Mapping[str, str]
    """Headers of this response only, and their meaning."""
    example: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a dependency adds to the routes that use it."""

    errors: tuple[str, ...] = ()
    body: type[RequestModel] | Raw | None = None
    """The type as which it reads the request's body."""
    scope: str | None = None
    """The scope that a tenant's caller needs."""
    scheme: str | None = None
    """A security scheme by which it may be called also from elsewhere than this machine."""
    session: bool = False
    """Whether only signed-in callers may call."""
    roles: tuple[str, ...] = ()
    """Which operators may call, acting on no tenant."""
    request_headers: Mapping[str, str] = field(default_factory=dict)
    response_headers: Mapping[str, str] = field(default_factory=dict)


def answers(
    model: Any = None,
    *statuses: int,
    errors: tuple[str, ...] = (),
    stream: Any = None,
    also: tuple[str, ...] = (),
    headers: Mapping[str, str] | None = None,
    example: Any = None,
) -> Callable[[Function], Function]:
    """The promise of a route. `statuses` are those of its success: 200, or 204 without a body."""
    promise = Promise(
        model=model,
        statuses=statuses or ((204,) if model is None else (200,)),
        errors=_published(errors),
        stream=stream,
        also=also,
        headers=headers or {},
        example=example,
    )
    return _attach(_PROMISE, promise)


def terms(**named: Any) -> Callable[[Function], Function]:
    """The Terms of a dependency, given by their fields."""
    added = Terms(**named)
    _published(added.errors)
    return _attach(_TERMS, added)


def promise_of(endpoint: Callable[..., Any]) -> Promise | None:
    """The declaration of the route; None if it has none."""
    promise: Promise | None = getattr(endpoint, _PROMISE, None)
    return promise


def terms_of(dependency: Callable[..., Any] | None) -> Terms | None:
    """The declaration of the dependency."""
    added: Terms | None = getattr(dependency, _TERMS, None)
    return added


def _attach(name: str, value: object) -> Callable[[Function], Function]:
    def attach(function: Function) -> Function:
        setattr(function, name, value)
        return function

    return attach


def _published(codes: tuple[str, ...]) -> tuple[str, ...]:
    unknown = set(codes) - set(ERROR_CODES)
    if unknown:
        raise ValueError(f"not published: {', '.join(sorted(unknown))}")
    return codes
