"""The usage of a request that generates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class PromptUsage(AnswerModel):
    prompt_tokens: int
    total_tokens: int
