"""The body of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from ..contract.request_model import invalid
from .generation import MAX_OUTPUT_TOKENS, GenerationBody, NumLogprobs
from .prompts import Prompt, PromptOptions, SentPrompts, as_prompts

MAX_SEQUENCES = 64
"""Prompts times choices of one request."""
MAX_BEST_OF = 20
DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody, PromptOptions):
    prompt: Annotated[
        list[Prompt],
        Field(min_length=1, max_length=MAX_SEQUENCES),
        BeforeValidator(as_prompts, json_schema_input_type=SentPrompts),
    ]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    """0: only the prompt is computed, for its log-probabilities."""
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    """The number of choices to generate, of which the `n` with the highest mean log-probability are
    returned; default: `n`."""
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    """Repeat the prompt before the output, with its log-probabilities if `logprobs` is set."""
    prompt_logprobs: NumLogprobs | None = None
    """In vLLM's format, in a separate field."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "model": "support-bot",
            "prompt": "Once upon a time",
            "max_tokens": 16,
            "temperature": 0.0,
        },
        {"model": "support-bot@3", "prompt": ["a", "b"], "n": 2, "seed": 7, "stop": ["\n"]},
    )

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.neutral,
        "suffix": ("",),
    }

    @model_validator(mode="after")
    def check_num_sequences(self) -> Self:
        if self.num_generated < self.num_choices:
            raise invalid("best_of", "is less than `n`")
        if self.stream and self.num_generated > self.num_choices:
            raise invalid("best_of", "cannot be greater than `n` in streams")
        if len(self.prompt) * self.num_generated > MAX_SEQUENCES:
            field = "n" if self.best_of is None else "best_of"
            raise invalid(field, f"requests more than {MAX_SEQUENCES} sequences")
        return self

    @model_validator(mode="after")
    def check_what_is_asked_of_prompts(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("max_tokens", "is 0, but neither `echo` nor `prompt_logprobs` is set")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not supported in streams")
        if self.stream and self.echo and self.logprobs is not None and self.num_choices > 1:
            raise invalid("n", "must be 1 in streams with `echo` and `logprobs`")
        return self

    @property
    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_generated(self) -> int:
        """Choices per prompt, `num_choices` of which are returned."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """The log-probabilities to compute: choices are also chosen by them."""
        is_chosen = self.num_generated > self.num_choices
        return 0 if self.logprobs is None and is_chosen else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens are asked for beside each of the prompt; None: nothing
        is."""
        asked = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((number for number in asked if number is not None), default=None)
