"""Generated requests to a real server: what the document allows, and what it forbids.

Each is sent with a key of every scope, and either without a key or with one of other scopes.
LORAPLEX_EXAMPLES sets the number per operation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from loraplex.api.contract.error_codes import ERROR_CODES
from loraplex.platform.keys.principal import OperatorRole, Scope
from support.published import DOCUMENT, OPEN
from support.server import Caller, ServerUnderTest

pytestmark = pytest.mark.slow

NUM_EXAMPLES = int(os.environ.get("LORAPLEX_EXAMPLES", "20"))
Operation = APIOperation[Any, Any, Any, Any]
AnyCase = Case[Any]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [cast(Operation, result.ok()) for result in SCHEMA.get_all_operations()]  # type: ignore[union-attr]
OPEN_TO_KEYS = OPEN | {"GET /v1/me"}
"""What every key opens."""
OWN = {"name": "bot", "number": 1, "alias": "prod", "model": "bot"}
"""Of the caller's own resources, in the place of what was generated."""
DESTRUCTIVE = {"delete_adapter", "delete_version", "remove_alias"}
MAX_TOKENS = 4


@pytest.fixture(scope="module", autouse=True)
def unlocked(server: ServerUnderTest) -> Iterator[None]:
    """The generated names that sign in nowhere lock nobody else."""
    yield
    server.forget_sign_in_failures()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture(scope="module")
def keys(server: ServerUnderTest, resident: Caller) -> dict[str, str]:
    """A key with each single scope, and operators' keys by their role."""
    scoped = {
        scope.value: server.make_caller(f"only-{scope.value.replace(':', '-')}", [scope]).key
        for scope in Scope
    }
    roles = {
        role.value: server.make_operator(f"generated-{role.value}", role) for role in OperatorRole
    }
    return {"tenant": resident.key, **scoped, **roles}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_every_answer_is_a_documented_one(
    operation: Operation,
    server: ServerUnderTest,
    session: requests.Session,
    keys: dict[str, str],
) -> None:
    security: list[dict[str, list[str]]] = operation.definition.raw["security"]
    allowed, refused = allowed_key(security, keys), refused_keys(security, keys)
    cases = st.one_of(
        operation.as_strategy(GenerationMode.POSITIVE),
        *(
            [operation.as_strategy(GenerationMode.NEGATIVE)]
            if operation.definition.raw.get("parameters")
            or "requestBody" in operation.definition.raw
            else []
        ),
    )

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, is_own=st.booleans(), other=st.sampled_from(refused))
    def check(case: AnyCase, is_own: bool, other: str) -> None:
        case.headers.pop("X-Loraplex-Tenant", None)  # it would meet a tenant by chance only
        if is_own:
            address_own(case)
        for key in (allowed, other):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = case.call(server.url, session, headers=headers)
            case.validate_response(answer, checks=CHECKS)
            is_refused = key != allowed and operation.label not in OPEN_TO_KEYS
            check_envelope(
                answer, is_refused=is_refused or (not key and operation.label not in OPEN)
            )

    check()


def allowed_key(security: list[dict[str, list[str]]], keys: dict[str, str]) -> str:
    """A key that may call it."""
    schemes = {name for scheme in security for name in scheme}
    is_operators = "operatorKey" in schemes and "tenantKey" not in schemes
    return keys[OperatorRole.ADMIN] if is_operators else keys["tenant"]


def refused_keys(security: list[dict[str, list[str]]], keys: dict[str, str]) -> list[str]:
    """No key, and one that may not call it."""
    needed = {name for scheme in security for names in scheme.values() for name in names}
    others = [key for name, key in keys.items() if name in set(Scope) and name not in needed]
    return ["", others[0]]


def address_own(case: AnyCase) -> None:
    """Let the request be about what the caller has, and cheap."""
    if case.operation.definition.raw["operationId"] in DESTRUCTIVE:
        return
    for name in set(case.path_parameters) & set(OWN):
        case.path_parameters[name] = OWN[name]
    if isinstance(case.body, dict) and "model" in case.body:
        case.body = {**case.body, "model": "tiny", "max_tokens": MAX_TOKENS}


def check_envelope(answer: Any, *, is_refused: bool) -> None:
    """Every error is the one envelope; who may not call is told so, and nothing else."""
    if answer.status_code < 400:
        assert not is_refused
        return
    error = answer.json()["error"]
    is_about_header = error["param"] == "Idempotency-Key"  # judged before the route is
    assert not is_refused or answer.status_code in {401, 403, 404, 405} or is_about_header
    assert set(error) == {"message", "type", "param", "code", "retryable", "request_id"}
    assert ERROR_CODES[error["code"]].status == answer.status_code
    assert error["request_id"] == answer.headers["x-request-id"][0]
