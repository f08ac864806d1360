"""The fields that say how a conversation becomes a prompt. Names as in vLLM."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from ...engine.text.chat_form import ChatForm
from ..contract.request_model import RequestModel, invalid

MAX_TEMPLATE_VARIABLES = 16
VariableName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]*$", min_length=1, max_length=64)
]
VariableValue = Annotated[str, Field(max_length=256)] | bool | int | float | None


class ChatFormBody(RequestModel):
    """What chats and `/tokenize` have in common beside their messages."""

    add_generation_prompt: bool | None = None
    """End where the answer begins; default: unless the final message is continued."""
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's."""
    chat_template_kwargs: (
        Annotated[dict[VariableName, VariableValue], Field(max_length=MAX_TEMPLATE_VARIABLES)]
        | None
    ) = None
    """Variables of the chat template, as `enable_thinking`: scalars that it reads."""

    @model_validator(mode="after")
    def check_end_of_prompt(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise invalid(
                "continue_final_message", "cannot be combined with `add_generation_prompt`"
            )
        return self

    @property
    def chat_form(self) -> ChatForm:
        """How the messages are rendered."""
        continues = bool(self.continue_final_message)
        return ChatForm(
            adds_generation_prompt=not continues and self.add_generation_prompt is not False,
            continues_final_message=continues,
            variables=self.chat_template_kwargs or {},
        )
