"""The base class of response schemas: dataclasses that msgspec encodes and pydantic describes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from msgspec import UnsetType
from pydantic import ConfigDict
from pydantic_core import CoreSchema, core_schema


class AnswerModel:
    """A JSON object. A field that is `UNSET` is absent; all others are always there.

    pydantic does not inherit the strings under fields: a field of a class with subclasses has its
    description in `Annotated`.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(use_attribute_docstrings=True)


class _IsAbsent:
    """Tells pydantic what msgspec's type means."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.missing_sentinel_schema()


Absent: TypeAlias = Annotated[UnsetType, _IsAbsent]
"""The type of `UNSET`."""
