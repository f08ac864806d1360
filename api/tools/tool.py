"""A function that a request offers to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""The schema of a function that takes none."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as the caller describes it."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    is_strict: bool
    """Its arguments follow the schema, whatever the model would like to write."""

    def for_template(self) -> dict[str, Any]:
        """In the form that chat templates know."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool parameters of a request."""

    tools: Sequence[Tool]
    """The tools presented to the model."""
    callable_names: frozenset[str]
    """The functions whose calls are parsed; a call of any other function is text."""
    is_required: bool
    """The answer is a call."""
    is_parallel: bool
    """Whether several calls are allowed."""

    @property
    def callable_tools(self) -> list[Tool]:
        return [tool for tool in self.tools if tool.name in self.callable_names]
