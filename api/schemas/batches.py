"""Schemas of `/v1/files` and `/v1/batches`, those of OpenAI's API. Moments are seconds since
1970."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, StringConstraints

from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel

View = TypeVar("View")

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]
FileId = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Label = Annotated[str, StringConstraints(max_length=64)]
LabelValue = Annotated[str, StringConstraints(max_length=512)]


@dataclass(frozen=True, slots=True)
class FileView(AnswerModel):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    """`batch`, `fine-tune`, `batch_output` for the results of a batch, or `evals` for a golden set
    made of samples."""
    status: Literal["processed"] = "processed"
    object: Literal["file"] = "file"


@dataclass(frozen=True, slots=True)
class DeletedFile(AnswerModel):
    id: str
    deleted: Literal[True] = True
    object: Literal["file"] = "file"


@dataclass(frozen=True, slots=True)
class CursorPage(AnswerModel, Generic[View]):
    """A page of a list; `after` of the next page is `last_id`."""

    data: list[View]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchBody(RequestModel):
    """A batch to create."""

    input_file_id: FileId
    """A file of the purpose `batch`."""
    endpoint: BatchEndpoint
    """The route of every line."""
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=16)] | None = None
    """The caller's own; returned unchanged."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "input_file_id": "file-0123456789abcdef0123456789abcdef",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"job": "nightly"},
        },
    )


@dataclass(frozen=True, slots=True)
class BatchErrorView(AnswerModel):
    """What is wrong with a line of the input."""

    code: str
    message: str
    param: str | None
    line: int | None
    """From 1; null for the whole file."""


@dataclass(frozen=True, slots=True)
class BatchErrors(AnswerModel):
    data: Sequence[BatchErrorView]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class RequestCounts(AnswerModel):
    """Lines of the input; 0 until it was checked."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class BatchView(AnswerModel):
    id: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    """The answers; null if there are none."""
    error_file_id: str | None
    """The errors; null if there are none."""
    created_at: int
    in_progress_at: int | None
    expires_at: int
    """The end of the completion window."""
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None
    object: Literal["batch"] = "batch"
