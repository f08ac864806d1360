"""How a conversation is rendered as a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TemplateValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The end of the prompt, and what the chat template is told beside messages and tools."""

    adds_generation_prompt: bool = True
    """The prompt ends where the answer begins."""
    continues_final_message: bool = False
    """The answer continues the last message, which the prompt does not end."""
    variables: Mapping[str, TemplateValue] = field(default_factory=dict)
    """Of the template, by name, as `enable_thinking`."""
