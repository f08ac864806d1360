"""Schemas of `POST /v1/embeddings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ..contract.answer_model import AnswerModel
from .generation import MAX_DEADLINE_MS, MAX_PRIORITY, ModelName, WeightedAdapters
from .prompt_usage import PromptUsage
from .prompts import Prompt, PromptOptions, SentPrompts, as_prompts

MAX_INPUTS = 2048
MAX_DIMENSIONS = 1 << 20


class EmbeddingBody(PromptOptions):
    model: ModelName
    adapters: WeightedAdapters | None = None
    """Their deltas are added to `model`'s."""
    input: Annotated[
        list[Prompt],
        Field(min_length=1, max_length=MAX_INPUTS),
        BeforeValidator(as_prompts, json_schema_input_type=SentPrompts),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Keep the first numbers of the vector only, for adapters trained for this; then normalize."""
    pooling: Literal["last", "mean"] | None = None
    """Hidden states of the last layer: the last token's (default), or the mean of all."""
    normalize: bool | None = None
    """Scale to length 1 (default)."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Priority among the tenant's own requests: lower values first."""
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """From arrival to the last vector."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "support-bot", "input": ["one text", "another"], "encoding_format": "float"},
    )

    tolerated: ClassVar[frozenset[str]] = frozenset({"metadata", "user"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
    }


@dataclass(frozen=True, slots=True)
class Embedding(AnswerModel):
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian fp32."""
    object: Literal["embedding"] = "embedding"


@dataclass(frozen=True, slots=True)
class EmbeddingList(AnswerModel):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage
    object: Literal["list"] = "list"
