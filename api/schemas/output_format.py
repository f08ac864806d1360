"""Output constraints: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from ...engine.grammars.limits import MAX_CHOICES
from ...engine.grammars.spec import GrammarKind, GrammarSpec
from ..contract.request_model import RequestModel, invalid, unsupported

FORMAT_TYPES = frozenset({"text", "json_object", "json_schema"})

SchemaName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(RequestModel):
    """A schema with a name. It is enforced for any value of `strict`."""

    name: SchemaName
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """Default: any object."""
    strict: bool | None = None

    @property
    def followed_schema(self) -> Mapping[str, Any]:
        return {"type": "object"} if self.json_schema is None else self.json_schema


class OutputFormat(RequestModel):
    """The answer as free text, any JSON object, or JSON that follows a schema."""

    type: str

    @model_validator(mode="after")
    def refuse_other_types(self) -> Self:
        if self.type not in FORMAT_TYPES:
            raise unsupported("type")
        return self

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The schema of the answer; None: it is free."""
        return {"type": "object"} if self.type == "json_object" else None

    @property
    def grammar(self) -> GrammarSpec | None:
        if self.type == "json_object":
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        schema = self.answer_schema
        return None if schema is None else schema_grammar(schema)


class ResponseFormat(OutputFormat):
    """As in `/v1/chat/completions` and `/v1/completions`."""

    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid(
                "json_schema", "is required for `type` json_schema and not allowed for others"
            )
        return self

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        return self.json_schema.followed_schema if self.json_schema else super().answer_schema


class StructuredOutputs(RequestModel):
    """vLLM's form: exactly one of these fields."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A schema, as an object or a string."""
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    """In llguidance's dialect of Lark."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False, True),
        "disable_fallback": (False, True),
    }

    @model_validator(mode="after")
    def check_only_one(self) -> Self:
        if len(self.model_fields_set & type(self).model_fields.keys()) != 1:
            raise ValueError("requires exactly one of json, json_object, regex, choice and grammar")
        return self

    @property
    def spec(self) -> GrammarSpec:
        if self.regex is not None:
            return GrammarSpec(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return GrammarSpec(GrammarKind.CHOICE, json.dumps(self.choice))
        if self.grammar is not None:
            return GrammarSpec(GrammarKind.LARK, self.grammar)
        if isinstance(self.json_schema, str):
            return GrammarSpec(GrammarKind.JSON_SCHEMA, self.json_schema)
        if self.json_schema is not None:
            return schema_grammar(self.json_schema)
        return GrammarSpec(GrammarKind.JSON_OBJECT)


def schema_grammar(schema: Mapping[str, Any]) -> GrammarSpec:
    """Raises InvalidGrammar if it is too long."""
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
