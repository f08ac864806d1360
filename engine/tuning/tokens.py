"""An example as tokens, and which of them are trained.

A chat is rendered by the base's own template. An assistant message is trained from the end of the
generation prompt, which requests end with, to the token that ends the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import EngineError
from ..text.chat_form import ChatForm
from ..text.tokenizer import Tokenizer
from .errors import InvalidTrainingData
from .lines import Completion, Conversation, Example

_PROMPT = ChatForm()
_WHOLE = ChatForm(adds_generation_prompt=False)


class TrainedTokens(NamedTuple):
    """One example."""

    token_ids: list[int]
    is_trained: list[bool]
    """By token: whether predicting it is trained."""

    @property
    def num_trained(self) -> int:
        return sum(self.is_trained)

    def cut(self, max_tokens: int) -> TrainedTokens:
        """The last tokens, as many as are admitted. Nothing comes before the first, so it is never
        predicted."""
        is_trained = self.is_trained[-max_tokens:]
        return TrainedTokens(self.token_ids[-max_tokens:], [False, *is_trained[1:]])


def tokenize(example: Example, tokenizer: Tokenizer) -> TrainedTokens:
    """Raises InvalidTrainingData without a line number if the template refuses the example, or does
    not write the messages one after another."""
    try:
        if isinstance(example, Completion):
            return _completion_tokens(example, tokenizer)
        return _chat_tokens(example, tokenizer)
    except EngineError as exc:
        raise InvalidTrainingData(str(exc)) from exc


def _completion_tokens(example: Completion, tokenizer: Tokenizer) -> TrainedTokens:
    prompt = tokenizer.encode(example.prompt)
    completion = _after(prompt, tokenizer.encode(example.prompt + example.completion))
    if completion is None:
        completion = tokenizer.encode(example.completion, add_special_tokens=False)
    is_trained = [False] * len(prompt) + [True] * len(completion)
    return _ended(TrainedTokens([*prompt, *completion], is_trained), tokenizer)


def _chat_tokens(chat: Conversation, tokenizer: Tokenizer) -> TrainedTokens:
    text, token_ids, is_trained = "", list[int](), list[bool]()
    for end, trains in _pieces(chat, tokenizer):
        if not end.startswith(text):
            raise InvalidTrainingData(
                "the chat template changes earlier messages when later ones follow; make each "
                "assistant message the last one of an example of its own"
            )
        added = _after(token_ids, _encode(end, tokenizer))
        if added is None:  # a token would span the border, where the prompt of a request ends
            added = _encode(end[len(text) :], tokenizer)
        token_ids += added
        is_trained += _up_to_end(added, tokenizer) if trains else [False] * len(added)
        text = end
    return _ended(TrainedTokens(token_ids, is_trained), tokenizer)


def _pieces(chat: Conversation, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """The rendered text up to each border, and whether what ends there is trained."""
    messages = list(chat.messages)
    for index in sorted(chat.trained):
        if index == 0:
            raise InvalidTrainingData("the first message is an assistant's")
        before = tokenizer.render_chat(messages[:index], tools=chat.tools, form=_PROMPT)
        yield before, False
        yield tokenizer.render_chat(messages[: index + 1], tools=chat.tools, form=_WHOLE), True


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _after(start: list[int], whole: list[int]) -> list[int] | None:
    """The tokens of `whole` that follow `start`; None if it does not begin so."""
    return whole[len(start) :] if whole[: len(start)] == start else None


def _up_to_end(token_ids: list[int], tokenizer: Tokenizer) -> list[bool]:
    """Every token up to the first that ends an output, which the model has to predict too."""
    is_end = [token in tokenizer.eos_token_ids for token in token_ids]
    num_trained = is_end.index(True) + 1 if True in is_end else len(is_end)
    return [place < num_trained for place in range(len(is_end))]


def _ended(tokens: TrainedTokens, tokenizer: Tokenizer) -> TrainedTokens:
    """The same, with a token that ends the output if no trained one does."""
    end, pairs = tokenizer.end_token_id, zip(*tokens, strict=True)
    if end is None or any(is_trained and t in tokenizer.eos_token_ids for t, is_trained in pairs):
        return tokens
    return TrainedTokens([*tokens.token_ids, end], [*tokens.is_trained, True])
