"""Routes whose dependencies are resolved by a plan that is computed once.

FastAPI walks a route's dependency tree for every request, keeps exit stacks, and looks for
parameters of every kind. Generation routes need none of this: their dependencies are coroutines of
the request and of each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

_PLANNED = {"dependencies", "name", "call", "request_param_name", "use_cache", "path", "scope"}
_OTHERS = [field.name for field in fields(Dependant) if field.name not in _PLANNED]
"""The fields of a dependant that a plan does not support; FastAPI handles them."""


class _Step(NamedTuple):
    """A call, and by parameter which value it takes: 0 is the request, then those of the calls
    before it."""

    call: Callable[..., Awaitable[Any]]
    takes: Sequence[tuple[str, int]]

    async def run(self, values: Sequence[Any]) -> Any:
        return await self.call(**{name: values[number] for name, number in self.takes})


class PlannedRoute(APIRoute):
    """A route like any other, described by FastAPI; planned where that is possible."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plan: list[_Step] = []
        if _is_plain(self.dependant):
            _add_steps(plan, self.dependant)
            self.app = _planned(plan)


def _planned(plan: Sequence[_Step]) -> ASGIApp:
    """Call it all in order; the last one answers. Errors are the application's to answer."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        values: list[Any] = [Request(scope, receive, send)]
        for step in plan:
            values.append(await step.run(values))
        await values[-1](scope, receive, send)

    return app


def _is_plain(dependant: Dependant) -> bool:
    """Whether it takes only the request and other plain dependencies, each once."""
    return (
        inspect.iscoroutinefunction(dependant.call)
        and dependant.use_cache
        and not any(getattr(dependant, name) for name in _OTHERS)
        and all(map(_is_plain, dependant.dependencies))
    )


def _add_steps(plan: list[_Step], dependant: Dependant) -> int:
    """Add the missing dependencies in topological order; returns the index of its value."""
    assert dependant.call is not None
    takes = [
        (part.name, number)
        for part in dependant.dependencies
        for number in [_add_steps(plan, part)]
        if part.name is not None
    ]
    if dependant.request_param_name is not None:
        takes.append((dependant.request_param_name, 0))
    calls = [step.call for step in plan]
    if dependant.call not in calls:
        plan.append(_Step(dependant.call, takes))
        calls.append(dependant.call)
    return calls.index(dependant.call) + 1
