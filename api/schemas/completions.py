"""The body of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from .generation import GenerationBody, NumLogprobs, TokenId
from .request_model import invalid

MAX_SEQUENCES = 64
"""Prompts times choices of one request."""
DEFAULT_MAX_TOKENS = 16


def _as_prompts(value: object) -> object:
    """One prompt, text or token ids, becomes a list of one."""
    is_token_ids = isinstance(value, list) and value and all(type(part) is int for part in value)
    return [value] if isinstance(value, str) or is_token_ids else value


def _kind_of_prompt(value: object) -> str:
    return "str" if isinstance(value, str) else "token_ids"


TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("str")] | Annotated[TokenIds, Tag("token_ids")],
    Discriminator(_kind_of_prompt),
]


class CompletionBody(GenerationBody):
    prompt: Annotated[
        list[Prompt], Field(min_length=1, max_length=MAX_SEQUENCES), BeforeValidator(_as_prompts)
    ]
    logprobs: NumLogprobs | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.neutral,
        "add_special_tokens": (True,),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    @model_validator(mode="after")
    def check_num_sequences(self) -> Self:
        if len(self.prompt) * self.num_choices > MAX_SEQUENCES:
            raise invalid("n", f"asks for more than {MAX_SEQUENCES} sequences")
        return self

    @property
    def output_limit(self) -> int:
        return self.max_tokens or DEFAULT_MAX_TOKENS
