"""Schemas of `POST /v1/score` and `/v1/rerank`. Names as in vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel, invalid
from .embeddings import MAX_INPUTS
from .generation import MAX_DEADLINE_MS, MAX_PRIORITY, MAX_TOKEN_ID, ModelName
from .prompt_usage import PromptUsage


def _as_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_text(value: object) -> object:
    """A document `{"text": …}` becomes its text."""
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_INPUTS),
    BeforeValidator(_as_texts, json_schema_input_type=str | list[str]),
]
Document = Annotated[
    str, BeforeValidator(_as_text, json_schema_input_type=str | dict[Literal["text"], str])
]


class PairOptions(RequestModel):
    """Of requests that score pairs of texts."""

    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens for pairs (default)."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """Keep this many tokens of each pair, by removing the last ones of the document; -1: as many as
    fit."""
    use_activation: bool | None = None
    """Sigmoid (default), if the adapter was not trained for regression; false: the head's output as
    it is."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Priority among the tenant's own requests: lower values first."""
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    """From arrival to the last score."""

    tolerated: ClassVar[frozenset[str]] = frozenset({"metadata", "user"})

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False


class ScoreBody(PairOptions):
    """Each `text_1` with the `text_2` of its place, or one `text_1` with all."""

    model: ModelName
    text_1: Texts
    text_2: Texts

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "relevance", "text_1": "a question", "text_2": ["one text", "another"]},
    )

    @model_validator(mode="after")
    def check_pairs(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise invalid("text_2", "must have as many texts as `text_1`, which has several")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        firsts = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(firsts, self.text_2, strict=True))


class RerankBody(PairOptions):
    model: ModelName
    query: str
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Return only this many of the best documents; 0: all (default)."""
    return_documents: bool | None = None
    """Repeat the documents in the answer (default)."""
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    """Keep this many tokens of each document, by removing its last ones; default: all."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"model": "relevance", "query": "a question", "documents": ["one text", "another"]},
    )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]


@dataclass(frozen=True, slots=True)
class Score(AnswerModel):
    index: int
    score: float
    object: Literal["score"] = "score"


@dataclass(frozen=True, slots=True)
class ScoreList(AnswerModel):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class DocumentText(AnswerModel):
    text: str


@dataclass(frozen=True, slots=True)
class RankedDocument(AnswerModel):
    index: int
    """Its place in the request."""
    relevance_score: float
    document: DocumentText | None
    """None: `return_documents` is false."""


@dataclass(frozen=True, slots=True)
class Ranking(AnswerModel):
    id: str
    model: str
    results: list[RankedDocument]
    """The best first; of equal scores in the order of the request."""
    usage: PromptUsage
