"""The base class of request bodies: strict types, finite numbers, no field silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError


class RequestModel(BaseModel):
    """A body whose unknown fields are refused by name.

    `tolerated` are fields that do not change the answer; `neutral` maps unsupported fields to the
    values that have no effect, such as `tools: []`. `examples` are complete bodies.
    """

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        frozen=True,
        use_attribute_docstrings=True,
    )

    tolerated: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    is_change: ClassVar[bool] = False
    """An omitted field leaves its value unchanged: it has no default."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The published schema, including tolerated and neutral fields; all others are refused."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core_schema))
        properties = schema.setdefault("properties", {})
        for name in sorted(cls.tolerated - set(properties)):
            properties[name] = {"description": "Accepted, without effect on the answer."}
        for name in sorted(set(cls.neutral) - set(properties)):
            properties[name] = {
                "enum": [*cls.neutral[name], None],
                "description": "Only values without an effect are accepted.",
            }
        if cls.is_change:
            for described in properties.values():
                described.pop("default", None)
        schema["additionalProperties"] = False
        if cls.examples:
            schema["examples"] = list(cls.examples)
        return schema

    @model_validator(mode="after")
    def refuse_unsupported_fields(self) -> Self:
        extra: dict[str, Any] = self.model_extra or {}
        for name, value in extra.items():
            if value is None or name in self.tolerated:
                continue
            if not any(_is_same(value, neutral) for neutral in self.neutral.get(name, ())):
                raise unsupported(name)
        return self


def _is_same(value: object, neutral: object) -> bool:
    """Equality that tells False from 0, and True from 1."""
    return type(value) is type(neutral) and value == neutral


def unsupported(field: str) -> PydanticCustomError:
    """The error for a field, or a value of it, that would change the meaning of the answer."""
    return PydanticCustomError(
        "unsupported_parameter", "is not supported, or not with this value", {"field": field}
    )


def invalid(field: str, message: str) -> PydanticCustomError:
    """The error for a field whose value contradicts the other fields."""
    return PydanticCustomError(
        "invalid_parameter", "{message}", {"field": field, "message": message}
    )
