"""The published OpenAPI document: current, complete, and equal to what the server serves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from fastapi import FastAPI

from loraplex.api.app import create_app
from loraplex.api.contract.error_codes import ERROR_CODES
from loraplex.api.contract.request_model import RequestModel
from loraplex.api.http.openapi import openapi_json
from support.published import DOCUMENT, OPEN, PRINTED
from support.server import PATIENCE_SECONDS, ServerUnderTest

UNSEEN = {
    # Refused before a route is known.
    "malformed_request",
    "headers_too_large",
    "host_not_allowed",
    "method_not_allowed",
    "too_many_connections",
    # What becomes of a version, read in its `reason`.
    "quantization_drift",
}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_the_document_is_current() -> None:
    app = create_app(None)  # type: ignore[arg-type]  # the document needs no runtime
    assert PRINTED.read_bytes() == openapi_json(app), "run `make docs`"


def test_threads_that_ask_at_once_wait_for_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    app, built = FastAPI(), []

    def build(of: FastAPI) -> dict[str, Any]:
        built.append(of)
        time.sleep(0.05)
        return {}

    monkeypatch.setattr("loraplex.api.http.openapi.openapi_document", build)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(openapi_json, [app] * 4)) == {b"{}\n"}
    assert built == [app]


def test_the_document_is_served_to_everybody(server: ServerUnderTest) -> None:
    answer = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_SECONDS)
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == PRINTED.read_bytes()


def test_the_document_is_valid() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_every_reference_leads_somewhere() -> None:
    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            part = list(part.values())
        if isinstance(part, list):
            for inner in part:
                yield from references(inner)

    for reference in set(references(DOCUMENT)):
        target: Any = DOCUMENT
        for name in reference.removeprefix("#/").split("/"):
            assert name in target, reference
            target = target[name]


def test_every_operation_says_what_it_does_takes_and_answers() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names)) >= 30
    tags = {tag["name"]: tag["description"] for tag in DOCUMENT["tags"]}
    assert all(tags.values())
    for path, method, operation in operations():
        assert operation["summary"], (method, path)
        assert set(operation["tags"]) <= set(tags)
        successes = [status for status in operation["responses"] if status < "300"]
        assert successes, (method, path)
        for status in successes:
            assert ("content" in operation["responses"][status]) == (status != "204")
        if f"{method.upper()} {path}" not in OPEN:
            assert {"401", "403", "500", "503"} <= set(operation["responses"]), (method, path)
            assert operation["security"], (method, path)


def test_what_is_open_is_said_to_be() -> None:
    def is_open(operation: dict[str, Any]) -> bool:
        return not operation["security"] or {} in operation["security"]

    found = operations()
    assert {f"{method.upper()} {path}" for path, method, each in found if is_open(each)} == OPEN


def test_every_code_is_an_answer_of_some_route() -> None:
    answered = set(DOCUMENT["components"]["examples"])
    assert {name.removeprefix("messages.") for name in answered} == set(ERROR_CODES) - UNSEEN


def test_an_error_of_the_messages_routes_is_documented_in_anthropics_shape() -> None:
    examples = DOCUMENT["components"]["examples"]
    theirs = {name: each["value"] for name, each in examples.items() if "messages." in name}
    assert theirs
    for name, value in theirs.items():
        assert value["type"] == "error"
        assert value["error"]["code"] == name.removeprefix("messages.")
    for path, method, operation in operations():
        for status, response in operation["responses"].items():
            if status >= "400":
                reference = response["$ref"].rpartition("/")[2]
                assert reference.startswith("messages.") == path.startswith("/v1/messages"), method


def all_models(model: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    for derived in model.__subclasses__():
        yield derived
        yield from all_models(derived)


BODIES = [
    model
    for model in all_models()
    if any(
        f'/{model.__name__}"' in json.dumps(operation.get("requestBody", ""))
        for _, _, operation in operations()
    )
]


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_the_examples_of_a_body_are_taken_and_fit_its_schema(model: type[RequestModel]) -> None:
    assert model.examples
    schema = {"$ref": f"#/components/schemas/{model.__name__}", **DOCUMENT}
    for example in model.examples:
        model.model_validate_json(json.dumps(example))
        jsonschema.validate(example, schema)
