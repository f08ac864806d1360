"""A conversation as the input of prompt rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that the assistant made."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    is_written_as_text: bool = False
    """The template gets the arguments as a JSON text, not as an object."""

    def for_template(self) -> dict[str, Any]:
        arguments: dict[str, Any] | str = dict(self.arguments)
        if self.is_written_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    text: str
    calls: tuple[PastCall, ...] = ()
    """For the assistant."""
    call_id: str | None = None
    """For a `tool`: the call that it answers."""
    tool_name: str | None = None
    reasoning: str | None = None
    """For the assistant."""

    def for_template(self) -> dict[str, Any]:
        """In the form that chat templates know."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.reasoning:
            names = ("reasoning_content", "reasoning", "thinking")
            message |= dict.fromkeys(names, self.reasoning)
        return message
