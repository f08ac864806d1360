"""The format of `/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from ...engine.messages import TokenLogprobs
from ...engine.text.tokenizer import Tokenizer
from ..inference.echo import Echo
from ..inference.order import Order
from ..inference.sequence_text import Delta
from ..schemas.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    Usage,
)
from .answering import PlainEvents
from .best_of import best_choices
from .logprobs import distinct_spellings, reported, spelled


class _Place(NamedTuple):
    """A token of a choice."""

    token_id: int
    offset: int
    """Its offset in the choice's text."""
    logprobs: TokenLogprobs | None
    """None: of the first token of all."""


class CompletionFormat(PlainEvents):
    """Plain completions; a chunk has the form of a whole answer."""

    def __init__(
        self,
        order: Order,
        tokenizer: Tokenizer,
        *,
        streams_usage: bool,
        echoes: Sequence[Echo] = (),
        num_prompt_logprobs: int | None = None,
        num_returned: int | None = None,
        returns_logprobs: bool = True,
    ) -> None:
        """`echoes`: the prompts, if answers repeat them. `num_prompt_logprobs`: the number of most
        likely tokens per prompt token, if these have their own field. `num_returned`: the number of
        choices per prompt that a complete answer has; None: all. `returns_logprobs`: if not, the
        order's log-probabilities only serve to choose them."""
        self._id = f"cmpl-{order.request_id}"
        self._created = int(time.time())
        self._model = order.model.name
        self._num_logprobs = order.sampling.num_logprobs if returns_logprobs else None
        self._num_prompt_logprobs = num_prompt_logprobs
        self._tokenizer = tokenizer
        self._streams_usage = streams_usage
        self._no_usage: UnsetType | None = None if streams_usage else UNSET
        self._num_choices = order.num_choices
        self._num_returned = num_returned or order.num_choices
        positions = [index for index in range(len(order.prompts)) for _ in range(order.num_choices)]
        self._echoes = [echoes[position] if echoes else None for position in positions]
        """Per choice, as the two below."""
        self._ends = [len(echo.text) if echo else 0 for echo in self._echoes]
        """The offset of the next token in the choice's text."""
        self._num_read = [0] * len(positions)
        """Tokens of its prompt that it has repeated with log-probabilities."""
        super().__init__()

    def opening(self) -> Iterator[Completion]:
        for index, echo in enumerate(self._echoes):
            if echo is not None:
                logprobs = self._logprobs(self._prompt_places(index, [None]))
                yield self._answer(
                    [CompletionChoice(index, echo.text, None, logprobs)], self._no_usage
                )

    def is_plain(self, index: int) -> bool:
        return self._num_logprobs is None

    def chunks(self, delta: Delta) -> Iterator[Completion]:
        if not (delta.text or delta.logprobs or delta.prompt_logprobs or delta.finish_reason):
            return
        places = [
            *self._prompt_places(delta.index, delta.prompt_logprobs),
            *self._output_places(delta.index, delta.logprobs),
        ]
        choice = CompletionChoice(
            delta.index, delta.text, delta.finish_reason, self._logprobs(places)
        )
        yield self._answer([choice], self._no_usage)

    def text_chunk(self, index: int, text: str) -> Completion:
        return self._answer([CompletionChoice(index, text, None, None)], self._no_usage)

    def closing(self, usage: Usage) -> Iterator[Completion]:
        if self._streams_usage:
            yield self._answer([], usage)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Completion:
        indices = best_choices(
            choices, num_generated=self._num_choices, num_returned=self._num_returned
        )
        whole = [
            replace(self._whole(index, choices), index=number)
            for number, index in enumerate(indices)
        ]
        return self._answer(whole, usage)

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)

    def _whole(self, index: int, choices: Sequence[Sequence[Delta]]) -> CompletionChoice:
        """A choice with its prompt, which was read for the first choice of the same prompt."""
        deltas, reading = choices[index], choices[index - index % self._num_choices]
        read = [entry for delta in reading for entry in delta.prompt_logprobs]
        output = [entry for delta in deltas for entry in delta.logprobs]
        places = [
            *self._prompt_places(index, [None, *read]),
            *self._output_places(index, output),
        ]
        echo, text = self._echoes[index], "".join(delta.text for delta in deltas)
        return CompletionChoice(
            index,
            echo.text + text if echo else text,
            deltas[-1].finish_reason,
            self._logprobs(places),
            prompt_logprobs=self._prompt_logprobs(read),
        )

    def _prompt_places(
        self, index: int, entries: Sequence[TokenLogprobs | None]
    ) -> Iterator[_Place]:
        """The next tokens of a choice's prompt; none if it is not repeated."""
        echo = self._echoes[index]
        if echo is None:
            return
        for entry in entries:
            number = self._num_read[index]
            self._num_read[index] += 1
            yield _Place(echo.token_ids[number], echo.offsets[number], entry)

    def _output_places(self, index: int, entries: Sequence[TokenLogprobs]) -> Iterator[_Place]:
        for entry in entries:
            yield _Place(entry.chosen.token_id, self._ends[index], entry)
            self._ends[index] += len(self._tokenizer.token_text(entry.chosen.token_id))

    def _logprobs(self, places: Iterable[_Place]) -> CompletionLogprobs | None:
        if self._num_logprobs is None:
            return None
        places = list(places)
        entries = [place.logprobs for place in places]
        return CompletionLogprobs(
            tokens=[spelled(self._tokenizer.token_bytes(place.token_id)) for place in places],
            token_logprobs=[
                None if entry is None else reported(entry.chosen.logprob) for entry in entries
            ],
            top_logprobs=[None if entry is None else self._top(entry) for entry in entries],
            text_offset=[place.offset for place in places],
        )

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens by their text, each once."""
        top = entry.top[: self._num_logprobs]
        # The chosen one's first: it is spelled here as in `tokens`.
        ids = [entry.chosen.token_id, *(token.token_id for token in top)]
        names = distinct_spellings({id_: self._tokenizer.token_bytes(id_) for id_ in ids})
        return {names[token.token_id]: reported(token.logprob) for token in top}

    def _prompt_logprobs(self, read: Sequence[TokenLogprobs]) -> PromptLogprobs | UnsetType:
        if self._num_prompt_logprobs is None:
            return UNSET
        return [None, *(self._ranked(entry) for entry in read)]

    def _ranked(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        top = entry.top[: self._num_prompt_logprobs]
        ranks = [(token, rank) for rank, token in enumerate(top, start=1)]
        assert entry.rank is not None, "tokens of a prompt are ranked"
        return {
            str(token.token_id): PromptLogprob(
                reported(token.logprob), rank, self._tokenizer.token_text(token.token_id)
            )
            for token, rank in [*ranks, (entry.chosen, entry.rank)]
        }
