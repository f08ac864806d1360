"""Generates the OpenAPI document from the routes.

Responses and errors are declared at the route (`contract/promises.py`), paths and parameters in its
signature, the schemas of bodies in `schemas/`, and the meanings of errors in
`contract/error_codes.py`. Nothing is declared twice.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts

from ...platform.version import __version__
from ..contract.error_codes import ERROR_CODES
from ..contract.errors import ApiError, ErrorEnvelope
from ..contract.message_errors import (
    MESSAGES_PATH,
    MessageErrorEnvelope,
    encode_error_of,
    is_messages_path,
)
from ..contract.openapi_shapes import Shapes
from ..contract.promises import Raw, Terms, promise_of, terms_of
from ..contract.request_model import RequestModel
from .auth import MESSAGES_KEY_HEADER
from .idempotency import IDEMPOTENCY_ERRORS, is_repeatable

Json = dict[str, Any]

_ALWAYS = ("internal_error",)
_WITH_PARAMETERS = ("invalid_parameter",)
_WITH_PATH_PARAMETERS = ("not_found",)
_MAX_NAMED_CODES = 4
_BUILDING = threading.Lock()
"""A document takes a second of CPU time, and threads that build it at once each take longer."""
_RAW_SCHEMAS: Json = {
    "application/json": {"type": "object"},
    "application/jsonl": {"type": "string"},
    "application/octet-stream": {"type": "string", "format": "binary"},
    "multipart/form-data": {
        "type": "object",
        "required": ["purpose", "file"],
        "properties": {
            "purpose": {"const": "batch"},
            "file": {"type": "string", "format": "binary"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer"},
        },
    },
    "text/csv": {"type": "string"},
    "text/plain": {"type": "string"},
}
_DESCRIPTION = """\
One base model serves the LoRA adapters of many tenants. Errors have one envelope; `code` is one of
the published ones. Times are ISO 8601 in UTC.
"""
_SECURITY_SCHEMES: Json = {
    "tenantKey": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "lpx_live_...",
        "description": "A tenant's API key. The required scopes are listed.",
    },
    "messagesKey": {
        "type": "apiKey",
        "in": "header",
        "name": MESSAGES_KEY_HEADER,
        "description": "A tenant's API key, as clients of Anthropic's API send it. "
        "`Authorization` takes precedence.",
    },
    "operatorKey": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "lpx_admin_...",
        "description": "An operator's key. With `X-Loraplex-Tenant` it acts on that tenant within "
        "its role; without, it can call the routes listed for its role.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "__Host-loraplex",
        "description": "A console session: of a tenant's user, within its role, or of an operator, "
        "as with its key. Methods other than GET also need the session's `csrf_token` as "
        "`X-CSRF-Token`. On the server's own machine, without TLS, the cookie is named "
        "`loraplex_session`.",
    },
    "metricsToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The value of `LORAPLEX_METRICS_TOKEN`.",
    },
}
_REPEATABLE = Terms(
    errors=IDEMPOTENCY_ERRORS,
    request_headers={
        "Idempotency-Key": "A repetition with the same key returns the first response."
    },
    response_headers={
        "idempotent-replayed": "`true` if this is the response to an earlier request."
    },
)
_TENANT_PARAMETER: Json = {
    "name": "X-Loraplex-Tenant",
    "in": "header",
    "required": False,
    "description": "The slug of the tenant that an operator acts on. A tenant's key may only name "
    "its own.",
    "schema": {"type": "string"},
}
_REQUEST_ID: Json = {
    "description": "The server's id of this request.",
    "schema": {"type": "string"},
}


def openapi_document(app: FastAPI) -> Json:
    """The document of every route of `app`. Raises ValueError for a route without a promise."""
    document = get_openapi(
        title="Loraplex", version=__version__, description=_DESCRIPTION, routes=app.routes
    )
    operations = [
        _Operation(method, route, document["paths"][route.path][method.lower()])
        for route in api_routes(app)
        for method in route.methods
    ]
    shapes = Shapes(
        [op.body for op in operations if op.body is not None and not isinstance(op.body, Raw)],
        [
            ErrorEnvelope,
            MessageErrorEnvelope,
            *(answer for op in operations for answer in op.answers),
        ],
    )
    responses: dict[str, Json] = {}
    of_parameters = _parameter_schemas(operations, document)
    for operation in operations:
        operation.describe(shapes, responses)
    document["tags"] = _tags(operations)
    document["components"] = {
        "securitySchemes": _SECURITY_SCHEMES,
        "parameters": {"Tenant": _TENANT_PARAMETER},
        "headers": {"RequestId": _REQUEST_ID},
        "schemas": {**of_parameters, **shapes.components},
        "responses": dict(sorted(responses.items())),
        "examples": _error_examples(operations),
    }
    return document


def _parameter_schemas(operations: Sequence[_Operation], document: Json) -> Json:
    """The schemas that parameters refer to, such as those of enumerations."""
    schemas: Json = document.get("components", {}).get("schemas", {})
    parameters = json.dumps([operation.described.get("parameters") for operation in operations])
    return {
        name: schema
        for name, schema in schemas.items()
        if f'"#/components/schemas/{name}"' in parameters
    }


def openapi_json(app: FastAPI) -> bytes:
    """The document as text, as committed and served; built once for all threads."""
    with _BUILDING:
        return _openapi_json(app)


@lru_cache(maxsize=1)
def _openapi_json(app: FastAPI) -> bytes:
    return (json.dumps(openapi_document(app), indent=1, ensure_ascii=False) + "\n").encode()


class ApiRoute(NamedTuple):
    """A route within the routers that include it."""

    path: str
    methods: list[str]
    endpoint: Callable[..., Any]
    dependant: Dependant


def api_routes(app: FastAPI) -> Iterator[ApiRoute]:
    """Every route of `app`."""
    for context in iter_route_contexts(app.routes):
        if isinstance(context.original_route, APIRoute):
            assert context.path_format is not None
            assert context.endpoint is not None
            methods = sorted(context.methods or ())
            yield ApiRoute(context.path_format, methods, context.endpoint, context.dependant)


class _Operation:
    """One method of one path: completes FastAPI's description of it."""

    def __init__(self, method: str, route: ApiRoute, described: Json) -> None:
        promise = promise_of(route.endpoint)
        if promise is None:
            raise ValueError(f"{route.path}: {route.endpoint.__name__} has no @answers")
        self.promise = promise
        self.described = described
        self.is_of_messages = is_messages_path(route.path)
        self.module = inspect.getmodule(route.endpoint)
        self.name = route.endpoint.__name__
        self.doc = inspect.getdoc(route.endpoint) or ""
        self.has_path_parameters = "{" in route.path
        self.terms = list(_terms(route.dependant))
        if is_repeatable(method, route.path) and not isinstance(self.body, Raw):
            self.terms.append(_REPEATABLE)
        self.codes = self._codes()

    @property
    def tag(self) -> str:
        assert self.module is not None
        return self.module.__name__.rpartition(".")[2]

    @property
    def body(self) -> type[RequestModel] | Raw | None:
        return next((added.body for added in self.terms if added.body is not None), None)

    @property
    def answers(self) -> list[Any]:
        """The possible JSON responses."""
        return [
            model
            for model in (self.promise.model, self.promise.stream)
            if model is not None and not isinstance(model, Raw)
        ]

    def describe(self, shapes: Shapes, responses: dict[str, Json]) -> None:
        """Complete FastAPI's description; error responses that routes share go to `responses`."""
        summary, _, description = self.doc.partition("\n\n")
        self.described["operationId"] = self.name
        self.described["summary"] = " ".join(summary.split()).removesuffix(".")
        self.described.pop("description", None)
        if description:
            self.described["description"] = description
        self.described["tags"] = [self.tag]
        self.described["security"] = self._security()
        if parameters := self._parameters():
            self.described["parameters"] = parameters
        if self.body is not None:
            self.described["requestBody"] = {
                "required": True,
                "content": _content(self.body, shapes),
            }
        self.described["responses"] = {
            **{str(status): self._success(shapes) for status in self.promise.statuses},
            **dict(self._errors(responses)),
        }

    def _codes(self) -> set[str]:
        codes = {*_ALWAYS, *self.promise.errors}
        for added in self.terms:
            codes.update(added.errors)
        if self.described.get("parameters"):
            codes.update(_WITH_PARAMETERS)
        if self.has_path_parameters:
            codes.update(_WITH_PATH_PARAMETERS)
        return codes

    def _security(self) -> list[Json]:
        if scheme := next((added.scheme for added in self.terms if added.scheme), None):
            return [{}, {scheme: []}]
        scopes = [added.scope for added in self.terms if added.scope is not None]
        if scopes:
            keys = ["tenantKey", *(["messagesKey"] if self.is_of_messages else []), "operatorKey"]
            return [{key: scopes} for key in (*keys, "session")]
        if any(added.session for added in self.terms):
            return [{"session": []}]
        roles = [role for added in self.terms for role in added.roles]
        if roles:
            return [{"operatorKey": roles}, {"session": roles}]
        is_closed = "missing_api_key" in self.codes
        return [{"tenantKey": []}, {"operatorKey": []}, {"session": []}] if is_closed else []

    def _parameters(self) -> list[Json]:
        parameters = list(self.described.get("parameters", ()))
        for added in self.terms:
            parameters += [_header(name, text) for name, text in added.request_headers.items()]
            if added.scope is not None:
                parameters.append({"$ref": "#/components/parameters/Tenant"})
        return parameters

    def _success(self, shapes: Shapes) -> Json:
        headers = dict(self.promise.headers)
        for added in self.terms:
            headers.update(added.response_headers)
        response: Json = {
            "description": "Done."
            if self.promise.model is None
            else _meaning_of(self.promise.model, shapes),
            "headers": {
                "x-request-id": {"$ref": "#/components/headers/RequestId"},
                **{
                    name: {"description": text, "schema": {"type": "string"}}
                    for name, text in headers.items()
                },
            },
        }
        if self.promise.model is not None:
            response["content"] = _content(self.promise.model, shapes)
            response["content"] |= _content(Raw(*self.promise.also), shapes)
        if self.promise.example is not None:
            example = msgspec.to_builtins(self.promise.example, str_keys=True)
            response["content"]["application/json"]["example"] = example
        if self.promise.stream is not None:
            response["content"]["text/event-stream"] = {
                "schema": {"description": "Server-sent events; their data: `x-event-schema`."},
                "x-event-schema": shapes.reference(self.promise.stream),
            }
        return response

    def _errors(self, responses: dict[str, Json]) -> Iterator[tuple[str, Json]]:
        for status in sorted({ERROR_CODES[code].status for code in self.codes}):
            codes = sorted(code for code in self.codes if ERROR_CODES[code].status == status)
            name = _name(_response_name(status, codes), self.is_of_messages)
            responses.setdefault(name, _error_response(codes, self.is_of_messages))
            yield str(status), {"$ref": f"#/components/responses/{name}"}


def _terms(dependant: Dependant) -> Iterator[Terms]:
    if (added := terms_of(dependant.call)) is not None:
        yield added
    for part in dependant.dependencies:
        yield from _terms(part)


def _content(model: Any, shapes: Shapes) -> Json:
    if isinstance(model, Raw):
        return {media_type: {"schema": _RAW_SCHEMAS[media_type]} for media_type in model}
    return {"application/json": {"schema": shapes.reference(model)}}


def _header(name: str, text: str) -> Json:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": text,
        "schema": {"type": "string"},
    }


def _response_name(status: int, codes: Sequence[str]) -> str:
    names = ".".join(codes)
    if len(codes) <= _MAX_NAMED_CODES:
        return names
    return f"{status}.{hashlib.sha256(names.encode()).hexdigest()[:8]}"


def _error_response(codes: Sequence[str], is_of_messages: bool) -> Json:
    """The answer with one of these codes, which share a status."""
    envelope = MessageErrorEnvelope if is_of_messages else ErrorEnvelope
    examples = {code: f"#/components/examples/{_name(code, is_of_messages)}" for code in codes}
    code = {"type": "string", "enum": list(codes)}
    body = {"properties": {"error": {"properties": {"code": code}}}}
    return {
        "description": "\n".join(f"`{code}`: {ERROR_CODES[code].meaning}" for code in codes),
        "headers": {"x-request-id": {"$ref": "#/components/headers/RequestId"}},
        "content": {
            "application/json": {
                "schema": {"allOf": [{"$ref": f"#/components/schemas/{envelope.__name__}"}, body]},
                "examples": {code: {"$ref": reference} for code, reference in examples.items()},
            }
        },
    }


def _error_examples(operations: Iterable[_Operation]) -> Json:
    """The envelope of each code, in each shape in which it is answered."""
    answered = sorted({(code, op.is_of_messages) for op in operations for code in op.codes})
    return {_name(code, shape): _error_example(code, shape) for code, shape in answered}


def _error_example(code: str, is_of_messages: bool) -> Json:
    path = MESSAGES_PATH if is_of_messages else ""
    envelope = encode_error_of(path, ApiError(code), "req-0123456789abcdef01234567")
    return {"value": json.loads(envelope)}


def _name(name: str, is_of_messages: bool) -> str:
    """The name of a component in one of the shapes."""
    return f"messages.{name}" if is_of_messages else name


def _tags(operations: Iterable[_Operation]) -> list[Json]:
    """A tag for each route module, with its docstring as the description."""
    modules = {operation.tag: operation.module for operation in operations}
    return [
        {"name": tag, "description": _first_paragraph(inspect.getdoc(module))}
        for tag, module in sorted(modules.items())
    ]


def _meaning_of(model: Any, shapes: Shapes) -> str:
    """A one-line description of a response."""
    doc = None if isinstance(model, Raw) else shapes.meaning(model)
    return _first_paragraph(doc) or "The response."


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split())
