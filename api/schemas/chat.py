"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from .generation import GenerationBody, NumLogprobs, OutputTokens
from .request_model import RequestModel, invalid, unsupported

MAX_MESSAGES = 2048
MAX_PARTS = 1024
ROLES = frozenset({"system", "developer", "user", "assistant"})


class ContentPart(RequestModel):
    """A part of a message; only text is served."""

    type: str
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_other_types(cls, part: object) -> object:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise unsupported("type")
        return part


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(RequestModel):
    role: str
    content: (
        Annotated[list[ContentPart], Field(max_length=MAX_PARTS), BeforeValidator(_as_parts)] | None
    ) = None

    tolerated: ClassVar[frozenset[str]] = frozenset({"name"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "tool_calls": ([],),
    }

    @model_validator(mode="after")
    def refuse_other_roles(self) -> Self:
        if self.role not in ROLES:
            raise unsupported("role")
        return self

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it, where `developer` is called `system`."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text or "" for part in self.content or [])}


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: OutputTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    tolerated: ClassVar[frozenset[str]] = GenerationBody.tolerated | {"parallel_tool_calls"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.neutral,
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
    }

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs `logprobs` to be true")
        return self

    @property
    def output_limit(self) -> int | None:
        """None: as many tokens as the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
