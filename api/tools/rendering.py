"""Renders probes with a chat template, to see what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...engine.errors import EngineError
from ...engine.text.chat_form import ChatForm, TemplateValue
from ...engine.text.tokenizer import Tokenizer
from .conversation import ChatMessage
from .tool import Tool


def rendered(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    variables: Mapping[str, TemplateValue] | None = None,
) -> str:
    """Empty if the template refuses them."""
    try:
        return tokenizer.render_chat(
            [message.for_template() for message in messages],
            tools=[tool.for_template() for tool in tools],
            form=ChatForm(variables=variables or {}),
        )
    except EngineError:
        return ""
