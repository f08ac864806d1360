"""Schemas of `POST /v1/classify`. Names as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ..contract.answer_model import AnswerModel
from .embeddings import MAX_INPUTS
from .generation import MAX_DEADLINE_MS, MAX_PRIORITY, ModelName
from .prompt_usage import PromptUsage
from .prompts import Prompt, PromptOptions, SentPrompts, as_prompts


class ClassifyBody(PromptOptions):
    model: ModelName
    input: Annotated[
        list[Prompt],
        Field(min_length=1, max_length=MAX_INPUTS),
        BeforeValidator(as_prompts, json_schema_input_type=SentPrompts),
    ]
    use_activation: bool | None = None
    """Softmax or sigmoid (default); false: the head's outputs as they are."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Priority among the tenant's own requests: lower values first."""
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """From arrival to the last result."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "ticket-topics", "input": ["one text", "another"]},
    )

    tolerated: ClassVar[frozenset[str]] = frozenset({"metadata", "user"})


@dataclass(frozen=True, slots=True)
class ClassifiedInput(AnswerModel):
    index: int
    label: str
    """The label of the largest output."""
    probs: list[float]
    """One for each label."""
    num_classes: int


@dataclass(frozen=True, slots=True)
class ClassificationList(AnswerModel):
    id: str
    created: int
    model: str
    data: list[ClassifiedInput]
    usage: PromptUsage
    object: Literal["list"] = "list"
