"""Reads texts for the training and measurement of drafts: JSON lines, tokenized like requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import EngineError, InvalidParameter
from ..text.chat_form import ChatForm
from ..text.tokenizer import Tokenizer

MIN_TOKENS = 4


class TrainingText(NamedTuple):
    """The tokens to learn, and the preceding ones."""

    token_ids: Sequence[int]
    num_context_tokens: int
    """The first ones, which are given and not learned."""


def read_texts(
    path: Path, tokenizer: Tokenizer, *, max_tokens: int, param: str = "data"
) -> list[TrainingText]:
    """Each line is `{"text": ...}`, learned completely; `{"messages": [...]}`, of which the last
    message is learned, possibly with `tools`; or `{"prompt": ..., "completion": ...}`, of which the
    completion is. Texts are truncated to `max_tokens`; very short texts are skipped.

    Raises InvalidParameter for `param` with the line that is none of them, or if no text remains.
    """
    texts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = _tokenized(json.loads(line), tokenizer)
            except (ValueError, TypeError, KeyError, EngineError) as exc:
                raise InvalidParameter(param, f"line {number}: {exc}") from exc
            text = text._replace(token_ids=text.token_ids[:max_tokens])
            if len(text.token_ids) >= max(MIN_TOKENS, text.num_context_tokens + 1):
                texts.append(text)
    if not texts:
        raise InvalidParameter(param, f"{path} has no text of {MIN_TOKENS} tokens or more")
    return texts


def _tokenized(entry: Any, tokenizer: Tokenizer) -> TrainingText:
    if not isinstance(entry, dict) or len(entry.keys() & {"text", "messages", "prompt"}) != 1:
        raise ValueError("has not exactly one of text, messages and prompt")
    if "text" in entry:
        return TrainingText(tokenizer.encode(entry["text"]), 0)
    if "prompt" in entry:
        before = tokenizer.encode(entry["prompt"])
        learned = tokenizer.encode(entry["completion"], add_special_tokens=False)
        return TrainingText([*before, *learned], len(before))
    messages, tools = entry["messages"], entry.get("tools", ())
    prompt = tokenizer.encode_chat(messages[:-1], tools=tools)
    whole = tokenizer.encode_chat(
        messages, tools=tools, form=ChatForm(adds_generation_prompt=False)
    )
    return TrainingText(whole, len(prompt))
