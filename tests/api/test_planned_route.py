"""A planned route responds like the same FastAPI route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from loraplex.api.http.planned_route import PlannedRoute

calls: list[str] = []


async def caller(request: Request) -> str:
    calls.append("caller")
    name = request.headers.get("x-caller")
    if name is None:
        raise HTTPException(401)
    return name


async def rights(who: Annotated[str, Depends(caller)]) -> str:
    calls.append("rights")
    return f"rights of {who}"


async def body(request: Request) -> Any:
    calls.append("body")
    return await request.json()


async def closing() -> AsyncIterator[str]:
    yield "open"
    calls.append("closed")


Rights = Annotated[str, Depends(rights)]


async def answer(request: Request, granted: Rights, sent: Annotated[Any, Depends(body)]) -> Any:
    return JSONResponse([request.url.path, granted, sent])


async def answer_number(number: int, granted: Rights) -> Response:
    return JSONResponse([number, granted])


async def answer_open(state: Annotated[str, Depends(closing)]) -> Response:
    return JSONResponse(state)


def app_of(route_class: type[APIRoute]) -> TestClient:
    router = APIRouter(route_class=route_class)
    dependencies = [Depends(caller)]
    router.add_api_route("/plain", answer, methods=["POST"], dependencies=dependencies)
    router.add_api_route("/number/{number}", answer_number, dependencies=dependencies)
    router.add_api_route("/open", answer_open)
    app = FastAPI()
    app.router.routes.extend(router.routes)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("method", "path", "headers", "content"),
    [
        ("POST", "/plain", {"x-caller": "me"}, "[1]"),
        ("POST", "/plain", {}, "not read"),
        ("POST", "/plain", {"x-caller": "me"}, "no JSON: nobody expects this error"),
        ("GET", "/plain", {"x-caller": "me"}, ""),
        ("GET", "/number/7", {"x-caller": "me"}, ""),
        ("GET", "/number/seven", {"x-caller": "me"}, ""),
        ("GET", "/open", {}, ""),
    ],
)
def test_answers_and_calls_are_the_same(
    method: str, path: str, headers: dict[str, str], content: str
) -> None:
    seen = []
    for route_class in (APIRoute, PlannedRoute):
        calls.clear()
        got = app_of(route_class).request(method, path, headers=headers, content=content)
        seen.append((got.status_code, got.content, list(calls)))
    assert seen[0] == seen[1]


def test_each_dependency_is_called_once_and_no_body_is_read_of_somebody_unknown() -> None:
    client = app_of(PlannedRoute)
    calls.clear()
    client.post("/plain", headers={"x-caller": "me"}, content="[]")
    assert calls == ["caller", "rights", "body"]
    calls.clear()
    client.post("/plain", content="[]")
    assert calls == ["caller"]


def test_only_what_reads_nothing_but_the_request_is_planned() -> None:
    app = FastAPI()
    app.router.route_class = PlannedRoute
    ends = {}
    for endpoint in (answer, answer_number, answer_open):
        app.add_api_route(f"/{endpoint.__name__}/{{number}}", endpoint)
        route = app.router.routes[-1]
        assert isinstance(route, PlannedRoute)
        ends[endpoint.__name__] = route.app.__module__ == PlannedRoute.__module__
    assert ends == {"answer": True, "answer_number": False, "answer_open": False}
