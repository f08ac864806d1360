"""JSON schemas for the OpenAPI document: bodies by pydantic, responses by msgspec."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from .request_model import RequestModel

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"


class Shapes:
    """The components of all bodies, and how to refer to them."""

    def __init__(self, bodies: Iterable[type[RequestModel]], structs: Iterable[Any]) -> None:
        sent = _schemas_of_bodies(list(dict.fromkeys(bodies)))
        structs = list(dict.fromkeys(structs))
        schemas, answered = msgspec.json.schema_components(structs, ref_template=_REF)
        for struct in _all_structs(structs):
            _complete(answered[_component_name(struct.cls)], struct)
        sent = _renamed(sent, sent.keys() & answered.keys())
        self._references = dict(zip(structs, schemas, strict=True))
        self.components: Json = dict(sorted({**sent, **answered}.items()))

    def reference(self, model: Any) -> Json:
        """The schema reference of a body's model or a response struct."""
        if isinstance(model, type) and issubclass(model, RequestModel):
            return {"$ref": _REF.format(name=model.__name__)}
        reference: Json = self._references[model]
        return reference


def _schemas_of_bodies(models: list[type[RequestModel]]) -> Json:
    _, defined = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF.replace("name", "model")
    )
    components: Json = defined.get("$defs", {})
    for schema in components.values():
        _drop_titles(schema)
    return components


def _renamed(components: Json, names: Collection[str]) -> Json:
    """A body and a response may have the same name; the body gets another one."""
    text = json.dumps(components)
    for name in names:
        text = text.replace(f'"{_REF.format(name=name)}"', f'"{_REF.format(name=name + "Input")}"')
    renamed: Json = json.loads(text)
    return {name + "Input" if name in names else name: renamed[name] for name in renamed}


def _drop_titles(schema: Any) -> None:
    """pydantic's titles are the names of the fields, in capitals."""
    if isinstance(schema, list):
        for entry in schema:
            _drop_titles(entry)
    if isinstance(schema, dict):
        if isinstance(schema.get("title"), str):
            del schema["title"]
        for entry in schema.values():
            _drop_titles(entry)


def _all_structs(models: Iterable[Any]) -> Iterator[msgspec.inspect.StructType]:
    """Every struct that is part of an answer, once."""
    seen = set()
    pending: list[Any] = list(msgspec.inspect.multi_type_info(models))
    while pending:
        found = pending.pop()
        match found:
            case msgspec.inspect.StructType():
                if found.cls in seen:
                    continue
                seen.add(found.cls)
                yield found
                pending += [field.type for field in found.fields]
            case msgspec.inspect.UnionType(types):
                pending += types
            case msgspec.inspect.DictType():
                pending.append(found.value_type)
            case msgspec.inspect.CollectionType():
                pending.append(found.item_type)
            case msgspec.inspect.Metadata():
                pending.append(found.type)


def _component_name(cls: Any) -> str:
    """The name that msgspec uses: a generic struct with its argument."""
    arguments = ", ".join(argument.__name__ for argument in getattr(cls, "__args__", ()))
    name = getattr(cls, "__origin__", cls).__name__
    return re.sub(r"[^\w.-]", "_", f"{name}[{arguments}]" if arguments else name)


def _complete(schema: Json, struct: msgspec.inspect.StructType) -> None:
    """Add what msgspec omits: required fields, time formats, descriptions of fields."""
    schema.pop("title", None)
    origin = getattr(struct.cls, "__origin__", struct.cls)
    meanings = field_meanings(origin)
    for field in struct.fields:
        described = schema["properties"][field.encode_name]
        described.pop("default", None)
        if not _may_be_absent(origin, field.name) and field.encode_name not in schema["required"]:
            schema["required"].append(field.encode_name)
        if _is_time(field.type):
            for part in described.get("anyOf", [described]):
                if part.get("type") == "string":
                    part["format"] = "date-time"
        if field.name in meanings:
            described["description"] = meanings[field.name]


def _may_be_absent(struct: type, name: str) -> bool:
    return "UnsetType" in str(inspect.get_annotations(struct).get(name, ""))


def _is_time(kind: msgspec.inspect.Type) -> bool:
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_is_time, kind.types))
    return isinstance(kind, msgspec.inspect.DateTimeType)


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
