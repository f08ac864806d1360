"""Schemas of `POST /tokenize` and `/detokenize`. Names as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel, invalid
from .chat_form import ChatFormBody
from .generation import ModelName, TokenId
from .messages import MAX_MESSAGES, Message
from .tools import MAX_TOOLS, ChatTool


class TokenizeBody(ChatFormBody):
    """Either a `prompt` or the `messages` of a chat."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    """The tools of the chat."""
    add_special_tokens: bool | None = None
    """For a prompt: add the tokenizer's special tokens at the beginning (default)."""
    return_token_strs: bool | None = None

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"prompt": "Hello"},
        {"model": "support-bot", "messages": [{"role": "user", "content": "Hi"}]},
    )

    @model_validator(mode="after")
    def check_one_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either `prompt` or `messages`")
        for name in ChatFormBody.model_fields:
            if self.messages is None and getattr(self, name) is not None:
                raise invalid(name, "requires `messages`")
        if self.messages is None and self.tools:
            raise invalid("tools", "require `messages`")
        if self.messages is not None and self.add_special_tokens:
            raise invalid(
                "add_special_tokens", "requires `prompt`; the chat template adds the special tokens"
            )
        return self


class DetokenizeBody(RequestModel):
    model: ModelName | None = None
    tokens: list[TokenId]

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"tokens": [1, 2, 3]},)


@dataclass(frozen=True, slots=True)
class Tokens(AnswerModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
    """As spelled in the vocabulary."""
    object: Literal["tokens"] = "tokens"


@dataclass(frozen=True, slots=True)
class Text(AnswerModel):
    prompt: str
    object: Literal["text"] = "text"
