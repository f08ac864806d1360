"""JSON schemas for the OpenAPI document, by pydantic."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import Any

from msgspec import UNSET
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core.core_schema import WithDefaultSchema

from .request_model import RequestModel

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"


class Shapes:
    """The components of all bodies and answers, and how to refer to them."""

    def __init__(self, bodies: Iterable[type[RequestModel]], answers: Iterable[Any]) -> None:
        inputs: list[tuple[Any, JsonSchemaMode]] = [
            *((model, "validation") for model in dict.fromkeys(bodies)),
            *((model, "serialization") for model in dict.fromkeys(answers)),
        ]
        adapters = [(model, mode, TypeAdapter(model)) for model, mode in inputs]
        schemas, defined = TypeAdapter.json_schemas(
            adapters, ref_template=_REF, schema_generator=_Schema
        )
        self._references = {model: schemas[model, mode] for model, mode in inputs}
        self.components: Json = defined["$defs"]
        for component in self.components.values():
            component.pop("title", None)

    def reference(self, model: Any) -> Json:
        """The schema reference of a body's or an answer's model."""
        return self._references[model]

    def meaning(self, model: Any) -> str | None:
        """The description of the model."""
        name = self._references[model]["$ref"].rpartition("/")[2]
        described: str | None = self.components[name].get("description")
        return described


class _Schema(GenerateJsonSchema):
    """Without titles, which are the names of the fields in capitals. In answers a field's default
    does not matter: every field is there unless it can be absent."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        if self.mode == "validation":
            return super().field_is_required(field, total)
        return field["schema"].get("default") is not UNSET

    def default_schema(self, schema: WithDefaultSchema) -> Json:
        if self.mode == "validation":
            return super().default_schema(schema)
        return self.generate_inner(schema["schema"])


@cache
def field_meanings(struct: type) -> dict[str, str]:
    """The strings under the fields in the source code, by field."""
    meanings: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls.__module__.partition(".")[0] != "loraplex":
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    meanings[name] = inspect.cleandoc(meaning)
    return meanings
