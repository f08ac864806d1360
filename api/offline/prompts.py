"""The prompts of an offline call: text, token IDs or conversations, as token IDs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter

from ...engine.errors import InvalidParameter
from ...engine.text.tokenizer import Tokenizer
from ..schemas.chat_form import ChatFormBody
from ..schemas.messages import Message, as_conversation
from ..tools.chat_prompt import ChatPrompts

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token IDs, or one of both under `prompt` or `prompt_token_ids`, as in vLLM."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`, as in `POST /v1/chat/completions`."""

_MESSAGES = TypeAdapter(list[Message])


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several. Raises InvalidParameter for none."""
    if not given and not isinstance(given, str):
        raise InvalidParameter("prompts", "is empty")
    is_token_ids = isinstance(given, Sequence) and all(type(part) is int for part in given)
    is_one = isinstance(given, (str, Mapping)) or is_token_ids
    return cast(list[Prompt], [given] if is_one else list(given))


def as_conversations(given: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several. Raises InvalidParameter for none."""
    if not given:
        raise InvalidParameter("messages", "is empty")
    is_one = isinstance(given[0], Mapping)
    return cast(list[Conversation], [given] if is_one else list(given))


def one_for_each(param: str, given: Any, number: int) -> list[Any]:
    """One value for each prompt. Raises InvalidParameter for a list of another length."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * number
    if len(given) != number:
        raise InvalidParameter(param, f"has {len(given)} entries for {number} prompts")
    return list(given)


def text_of(prompt: Prompt) -> str | None:
    """The text of a prompt; None: it is token IDs."""
    value = _content(prompt)
    return value if isinstance(value, str) else None


def encode(prompt: Prompt, tokenizer: Tokenizer, *, max_tokens: int) -> list[int]:
    """Token IDs of a prompt, with the special tokens that the base begins with.

    Raises InvalidParameter, or PromptTooLong for a text that certainly has more than `max_tokens`.
    """
    value = _content(prompt)
    if isinstance(value, str):
        return tokenizer.encode(value, max_tokens=max_tokens)
    if not all(type(token) is int for token in value):
        raise InvalidParameter("prompts", "must be text or token IDs")
    return list(value)


def encode_chat(
    conversation: Conversation,
    prompts: ChatPrompts,
    tokenizer: Tokenizer,
    *,
    form: ChatFormBody,
    max_tokens: int,
) -> list[int]:
    """Token IDs of a conversation in the base's chat template. Raises ValidationError, ApiError or
    an EngineError."""
    messages = as_conversation(_MESSAGES.validate_python(list(conversation)))
    return prompts.encode(
        messages, (), tokenizer=tokenizer, form=form.chat_form, max_tokens=max_tokens
    )


def _content(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    found = [prompt[name] for name in ("prompt_token_ids", "prompt") if name in prompt]
    if not found or not set(prompt) <= {"prompt", "prompt_token_ids"}:
        raise InvalidParameter("prompts", "must have prompt or prompt_token_ids, and nothing else")
    content: str | Sequence[int] = found[0]
    return content
