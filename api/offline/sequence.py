"""One sequence of an offline call, from its request to its output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ...engine.messages import (
    GenerationRequest,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)
from ...engine.text.text_form import TextForm
from ...engine.text.tokenizer import Tokenizer
from ..contract.errors import ApiError
from ..inference.sequence_text import Delta, SequenceText
from .engine_thread import RequestEvent
from .errors import LLMError, llm_error
from .outputs import CompletionOutput, Logprob, Logprobs

CALLERS_MISTAKE = 400
"""The published status of a request that cannot be meant."""


class OpenSequence:
    """Reads the events of one choice for one prompt."""

    def __init__(
        self,
        request: GenerationRequest,
        *,
        position: int,
        choice: int,
        tokenizer: Tokenizer,
        form: TextForm,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        """`position`: that of the prompt in the call. `stop_token_ids`: those that the caller
        gave."""
        self.request = request
        self.position = position
        self.choice = choice
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.embedding: bytes | None = None
        """fp32, of the whole prompt."""
        self._stop_token_ids = stop_token_ids
        self._tokenizer = tokenizer
        self._text = SequenceText(choice, request, tokenizer=tokenizer, form=form)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: Literal["stop", "length", "error"] | None = None
        self._stop_reason: int | str | None = None
        self.error: LLMError | None = None
        """What ended it alone."""

    def take(self, event: RequestEvent) -> bool:
        """Read the next event; True: the output is complete.

        Raises LLMError if the request is a mistake of the caller.
        """
        match event:
            case RequestStarted():
                self.num_cached_tokens = event.num_cached_tokens
            case PromptOutput():
                self.prompt_logprobs += event.logprobs
                self.embedding = event.embedding or self.embedding
            case TokensGenerated():
                delta, num_tokens = self._text.push(event)
                self._token_ids += event.token_ids[:num_tokens]
                self._logprobs += (event.logprobs or [])[:num_tokens]
                self._add(delta)
            case RequestFinished():
                self._finish(event)
        return self._finish_reason is not None

    def output(self) -> CompletionOutput:
        """The output, once it is complete."""
        assert self._finish_reason is not None, "the engine ends every request"
        has_logprobs = self.request.sampling.num_logprobs is not None
        return CompletionOutput(
            index=self.choice,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            cumulative_logprob=(
                sum(each.chosen.logprob for each in self._logprobs) if has_logprobs else None
            ),
            logprobs=(
                [as_logprobs(each, self._tokenizer) for each in self._logprobs]
                if has_logprobs
                else None
            ),
            error=self.error,
        )

    def _finish(self, event: RequestFinished) -> None:
        try:
            self._add(self._text.finish(event))
        except ApiError as exc:
            error = llm_error(exc, where=f"prompt {self.position}")
            if exc.published.status == CALLERS_MISTAKE:
                raise error from exc
            self._finish_reason, self.error = "error", error
        if self._stop_reason is None and event.stop_token_id in self._stop_token_ids:
            self._stop_reason = event.stop_token_id

    def _add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._finish_reason = delta.finish_reason
        self._stop_reason = delta.stop


def as_logprobs(position: TokenLogprobs, tokenizer: Tokenizer) -> Logprobs:
    """The log-probabilities of one position: the most likely tokens first."""
    ranked = [(token, rank) for rank, token in enumerate(position.top, start=1)]
    found = {token.token_id: _logprob(token, rank, tokenizer) for token, rank in ranked}
    chosen = position.chosen
    found.setdefault(chosen.token_id, _logprob(chosen, position.rank, tokenizer))
    return found


def _logprob(token: TokenLogprob, rank: int | None, tokenizer: Tokenizer) -> Logprob:
    return Logprob(token.logprob, rank, tokenizer.token_text(token.token_id))
