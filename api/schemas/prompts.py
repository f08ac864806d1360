"""Plain prompts: text or token ids, one or several, and their conversion to model input."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from ..contract.request_model import RequestModel
from .generation import MAX_TOKEN_ID, TokenId


def as_prompts(value: object) -> object:
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
SentPrompts = str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
"""As callers send them; see `as_prompts`."""


class PromptOptions(RequestModel):
    """Named as in vLLM."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens at the beginning (default)."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """Keep this many last tokens of each prompt; -1: as many as fit."""

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False
