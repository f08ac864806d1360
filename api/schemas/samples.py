"""Schemas of an adapter's sampling and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...platform.samples.models import ExportFormat, SampleKind
from ...platform.samples.service import MAX_SAMPLES
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .aliases import VersionNumber


class AdapterSamplingBody(RequestModel):
    """Keep samples of an adapter's requests."""

    percent: Annotated[float, Field(gt=0, le=100)]
    """The share of the requests."""
    days: Annotated[int, Field(ge=1, le=3660)]
    """How long a sample is kept, at most the operator's maximum."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({"percent": 5.0, "days": 14},)


@dataclass(frozen=True, slots=True)
class SamplingView(AnswerModel):
    """Whether samples of an adapter's requests are kept."""

    volatile: ClassVar[tuple[str, ...]] = ("samples",)

    adapter: str
    enabled: bool
    percent: float | None
    """Null: sampling is off."""
    days: int | None
    since: datetime | None
    """Answers before this are not kept: sampling was turned on, or all samples were deleted."""
    changed_at: datetime | None
    changed_by: str | None
    """As of an alias's change."""
    samples: int
    """How many there are."""
    max_days: int
    """The operator's maximum; 0: the operator allows no samples."""
    object: Literal["adapter.sampling"] = "adapter.sampling"


@dataclass(frozen=True, slots=True)
class SampleView(AnswerModel):
    """A sample, without its content."""

    id: str
    adapter: str
    version: int
    request_id: str
    kind: SampleKind
    """`chat` for chat completions, responses and messages."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    size_bytes: int
    """Of the content."""
    created_at: datetime
    """When the answer was complete."""
    expires_at: datetime
    object: Literal["sample"] = "sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleContentView(SampleView):
    """A sample with its content, in the form of chat completions."""

    messages: Sequence[Mapping[str, Any]] | None
    """Null in a completion."""
    tools: Sequence[Mapping[str, Any]] | None
    """Null if the request had none."""
    answer: Mapping[str, Any] | None
    """The assistant's message; null in a completion."""
    prompt: str | None
    """Null in a chat."""
    completion: str | None
    """Null in a chat."""


class SampleExportBody(RequestModel):
    """Make a file of an adapter's samples."""

    format: ExportFormat
    """`training`: data of fine-tuning jobs. `golden`: a golden set."""
    kind: SampleKind = SampleKind.CHAT
    version: VersionNumber | None = None
    """Of this version; null: of all."""
    limit: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = MAX_SAMPLES
    """The newest ones."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"format": "training", "version": 3, "limit": 1000},
    )


@dataclass(frozen=True, slots=True)
class SamplesDeletionView(AnswerModel):
    """The receipt of a deletion of samples; the audit log has it too."""

    adapter: str
    samples: int
    """How many were deleted."""
    deleted_at: datetime
    object: Literal["adapter.samples.deletion"] = "adapter.samples.deletion"
