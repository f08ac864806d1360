"""Schemas of `/v1/adapters` and `/v1/uploads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field, StringConstraints

from ...adapters.classification import Task
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel

MAX_ALIASES = 16

Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
View = TypeVar("View")


class UploadBody(RequestModel):
    """An adapter to upload: `config` is its adapter_config.json."""

    config: dict[str, Any]
    size_bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    sha256: Annotated[str, StringConstraints(min_length=64, max_length=64)]
    """SHA-256 of the weights file, hexadecimal."""
    aliases: Annotated[list[Name], Field(max_length=MAX_ALIASES, default_factory=list)]
    base_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    """The base that the adapter was trained on, if known."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "config": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
            "size_bytes": 1_048_576,
            "sha256": "0123456789abcdef" * 4,
            "aliases": ["prod"],
        },
    )


@dataclass(frozen=True, slots=True)
class Reason(AnswerModel):
    """The reason for a rejection."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class VersionView(AnswerModel):
    """One immutable version; `id` is its model name in requests."""

    id: str
    adapter: str
    version: int
    digest: str
    state: str
    reason: Reason | None
    state_changed_at: datetime
    base_id: str
    size_bytes: int
    aliases: list[str]
    tier: str
    """The tier of its weights now: `device`, `host`, or `store` (also for disk)."""
    task: Task
    """`classify` for a classifier, else `generate`."""
    features: list[str]
    """Features besides A and B, such as `dora`."""
    created_at: datetime
    report: Mapping[str, Any]
    """The intake report."""
    attestation: Mapping[str, Any] | None
    """Its measured effect on the base's logits."""
    lineage: Mapping[str, Any] | None
    """How a fine-tuning job made it: the job, the base, the digests of the data, the recipe. Null:
    it was pushed."""
    history: str
    """Path of its state transitions."""
    readiness: str
    """Path of its readiness."""
    object: Literal["adapter.version"] = "adapter.version"


@dataclass(frozen=True, slots=True)
class UploadView(AnswerModel):
    id: str
    adapter: str
    state: str
    received_bytes: int
    size_bytes: int
    sha256: str
    created_at: datetime
    updated_at: datetime
    """Time of the last acknowledged bytes or state change."""
    reason: Reason | None
    already: bool = False
    """A live version with these bytes exists; the upload is skipped."""
    version: VersionView | None = None
    """That version."""
    object: Literal["upload"] = "upload"


@dataclass(frozen=True, slots=True)
class TransitionView(AnswerModel):
    """A state transition of a version."""

    state: str
    reason: Reason | None
    at: datetime
    object: Literal["adapter.transition"] = "adapter.transition"


@dataclass(frozen=True, slots=True)
class CanaryView(AnswerModel):
    """The version that gets a part of the alias's requests."""

    version: int
    percent: float


@dataclass(frozen=True, slots=True)
class AdapterView(AnswerModel):
    id: str
    name: str
    created_at: datetime
    aliases: Mapping[str, int]
    canaries: Mapping[str, CanaryView]
    """Canaries of the split aliases."""
    versions: list[VersionView]
    object: Literal["adapter"] = "adapter"


@dataclass(frozen=True, slots=True)
class AdapterSummaryView(AnswerModel):
    """An adapter in a list; versions and reports are in the single resource only."""

    id: str
    tenant: str
    name: str
    num_versions: int
    latest_version: int
    state: str
    """State of the latest version, which `rank` and `effect` also describe."""
    aliases: Mapping[str, int]
    canaries: Mapping[str, CanaryView]
    """Canaries of the split aliases."""
    task: Task
    """`classify` if the latest version is a classifier, else `generate`."""
    rank: int | None
    """The largest rank of its matrices; null without A and B."""
    bytes: int
    """Stored bytes of all versions."""
    effect: float | None
    """The largest change of the base's logits, measured by attestation."""
    tier: str
    """The fastest tier with one of its versions: `device`, `host` or `store`."""
    last_used: datetime | None
    requests: int
    """In the last 30 days."""
    p95_ms: float | None
    """Of its latest requests, from arrival to the last byte."""
    created_at: datetime
    object: Literal["adapter.summary"] = "adapter.summary"


@dataclass(frozen=True, slots=True)
class ListView(AnswerModel, Generic[View]):
    data: list[View]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class PageView(AnswerModel, Generic[View]):
    """A page of a list, in a stable order."""

    data: list[View]
    has_more: bool
    next_after: str | None
    """Value of `after` for the next page; null on the last page."""
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class DeletionView(AnswerModel):
    """The version is deleted from the device, memory, disk and the store."""

    version: int
    digest: str
    requested_at: datetime
    finished_at: datetime
    receipt: Mapping[str, Any] | None
    """Freed bytes, and the requests that were running."""
    object: Literal["adapter.deletion"] = "adapter.deletion"


@dataclass(frozen=True, slots=True)
class DeletionsView(AnswerModel):
    """The response to a deletion: a receipt for each version."""

    adapter: str
    versions: list[DeletionView]
    object: Literal["adapter.deletions"] = "adapter.deletions"


@dataclass(frozen=True, slots=True)
class SpeculationView(AnswerModel):
    """Speculative decoding on this server."""

    proposers: Sequence[str]
    """Accepted values of `speculation.proposer` in a request."""
    max_draft_tokens: int
    acceptance: str


@dataclass(frozen=True, slots=True)
class EndView(AnswerModel):
    """The weight of the base's input embedding or output head."""

    quantization: str
    """Its format; `none`: it is in the base's dtype."""
    bytes: int
    """Memory that it takes; 0 for a head that shares the embedding's weight."""


@dataclass(frozen=True, slots=True)
class BaseView(AnswerModel):
    """The base model that adapters must fit."""

    id: str
    base_id: str
    model_type: str
    num_parameters: int
    dtype: str
    quantization: str
    embedding: EndView
    output_head: EndView
    max_model_len: int
    num_tokens: int
    """Of the base's tokenizer: from this ID on, tokens are an adapter's own."""
    num_modules: int
    targets: list[str]
    """Last name components of the modules that LoRA can target."""
    max_full_matrix_bytes: int
    """Maximum bytes of one adapter's full matrices (`modules_to_save`); 0: not allowed."""
    refused: Mapping[str, str]
    """Modules that LoRA cannot target, with the reason."""
    speculation: SpeculationView
    object: Literal["base_model"] = "base_model"
