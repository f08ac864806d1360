"""Converts one sequence's tokens to text, with stop strings and the finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ...engine.messages import (
    FinishReason,
    GenerationRequest,
    PromptOutput,
    RequestFinished,
    TokenLogprobs,
    TokensGenerated,
)
from ...engine.text.detokenizer import Detokenizer
from ...engine.text.text_form import TextForm
from ...engine.text.tokenizer import Tokenizer
from ..contract.errors import from_error_info
from ..tools.reasoning import Reasoning
from .reasoning_count import count_reasoning


class Delta(msgspec.Struct, frozen=True, gc=False):
    """The next text of one choice. There is one per token, and it is never part of a cycle."""

    index: int
    text: str
    logprobs: Sequence[TokenLogprobs]
    """For the added tokens; their text may still be held back."""
    finish_reason: Literal["stop", "length"] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """For the prompt's next tokens; the first has none."""
    embedding: bytes | None = None
    """The embedding of the whole prompt, fp32."""
    stop: str | None = None
    """The stop string that ended the choice."""

    @property
    def is_text(self) -> bool:
        """Whether it contains only text, and possibly the end."""
        return not (self.logprobs or self.prompt_logprobs or self.embedding)


class SequenceText:
    """Detokenizes one sequence; the token that ends it is no part of the text, unless the form
    includes it. Plain completions list its log-probabilities, as those of OpenAI and vLLM do: who
    scores a text with `echo` and one generated token leaves the last one out, whatever it is."""

    def __init__(
        self,
        index: int,
        request: GenerationRequest,
        *,
        tokenizer: Tokenizer,
        form: TextForm,
        reasoning: Reasoning | None = None,
    ) -> None:
        """`reasoning`: what the text may begin with, of which the tokens are counted."""
        self._index = index
        self._reasoning = None if reasoning is None else count_reasoning(reasoning)
        prompt = request.prompt_token_ids if form.continues_prompt else ()
        special = tokenizer.special_token_ids if form.shows_special_tokens else ()
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=prompt,
            stop=form.stop,
            include_stop=form.includes_stop,
            num_unstopped_tokens=form.num_unstopped_tokens,
            visible_token_ids=special or form.visible_token_ids,
            observe=None if self._reasoning is None else self._reasoning.push,
        )
        self._is_plain = not self._detokenizer.has_stops and self._reasoning is None
        end_ids = () if form.includes_stop else request.sampling.stop_token_ids
        self._hidden_end_ids = frozenset(end_ids)
        self._lists_end = form.continues_prompt

    @property
    def num_reasoning_tokens(self) -> int:
        """The tokens of the reasoning so far."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    @property
    def is_in_answer(self) -> bool:
        """The last token belongs to the answer, not to its reasoning."""
        return self._reasoning is None or self._reasoning.is_in_answer

    def read(self, event: PromptOutput) -> Delta:
        """Process the results for the prompt."""
        return Delta(self._index, "", [], prompt_logprobs=event.logprobs, embedding=event.embedding)

    def push(self, event: TokensGenerated) -> tuple[Delta, int]:
        """The delta of these tokens, and how many of them the caller pays for.

        The delta finishes the sequence if it completed a stop string.
        """
        token_ids = event.token_ids
        if len(token_ids) == 1 and self._is_plain and token_ids[0] not in self._hidden_end_ids:
            text = self._detokenizer.push_one(token_ids[0])
            return Delta(self._index, text, event.logprobs or ()), 1
        ends_here = bool(token_ids) and token_ids[-1] in self._hidden_end_ids
        piece = self._detokenizer.push(token_ids[:-1] if ends_here else token_ids)
        if self._reasoning is not None and self._reasoning.is_final:
            self._is_plain = not self._detokenizer.has_stops
        listed = piece.num_tokens + (ends_here and self._lists_end and piece.stop is None)
        logprobs = (event.logprobs or [])[:listed]
        if piece.stop is not None:
            delta = Delta(self._index, piece.text, logprobs, "stop", stop=piece.stop)
            return delta, piece.num_tokens
        return Delta(self._index, piece.text, logprobs), len(token_ids)

    def finish(self, event: RequestFinished) -> Delta:
        """The rest of the text. Raises ApiError unless the sequence ended well."""
        if event.error is not None:
            raise from_error_info(event.error)
        assert event.reason is not FinishReason.ABORTED, "who aborts does not listen any more"
        piece = self._detokenizer.finish()
        by_length = event.reason is FinishReason.LENGTH and piece.stop is None
        reason: Literal["stop", "length"] = "length" if by_length else "stop"
        return Delta(self._index, piece.text, [], reason, stop=piece.stop)
