"""The bodies of `/v1/adapters` and `/v1/uploads`, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from pydantic import Field, StringConstraints

from .request_model import RequestModel

MAX_ALIASES = 16

Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
View = TypeVar("View")


class UploadBody(RequestModel):
    """An adapter that is about to be sent: `config` is its adapter_config.json."""

    config: dict[str, Any]
    size_bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    sha256: Annotated[str, StringConstraints(min_length=64, max_length=64)]
    """Of the weights file, hexadecimal."""
    aliases: Annotated[list[Name], Field(max_length=MAX_ALIASES, default_factory=list)]
    base_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    """The base that the adapter was trained on, if the sender knows."""

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "config": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
            "size_bytes": 1_048_576,
            "sha256": "0123456789abcdef" * 4,
            "aliases": ["prod"],
        },
    )


class Reason(msgspec.Struct, frozen=True):
    """Why something was rejected."""

    code: str
    message: str


class VersionView(msgspec.Struct, frozen=True):
    """One immutable version; `id` is the name to call it by."""

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
    """Where its weights are now: `device`, `host`, or `store` for both further away."""
    features: list[str]
    """What it uses beyond A and B, such as `dora`."""
    created_at: datetime
    report: Mapping[str, Any]
    """What intake found."""
    attestation: Mapping[str, Any] | None
    """Its measured effect on the base's logits."""
    history: str
    """Path of its transitions."""
    readiness: str
    """Path that says why it is not ready, or that it is."""
    object: Literal["adapter.version"] = "adapter.version"


class UploadView(msgspec.Struct, frozen=True):
    id: str
    adapter: str
    state: str
    received_bytes: int
    size_bytes: int
    sha256: str
    created_at: datetime
    updated_at: datetime
    """When bytes were acknowledged, or the state changed, for the last time."""
    reason: Reason | None
    already: bool = False
    """The adapter has these bytes as a live version: there is nothing to send."""
    version: VersionView | None = None
    """That version."""
    object: Literal["upload"] = "upload"


class TransitionView(msgspec.Struct, frozen=True):
    """A state that a version entered."""

    state: str
    reason: Reason | None
    at: datetime
    object: Literal["adapter.transition"] = "adapter.transition"


class CanaryView(msgspec.Struct, frozen=True):
    """The version that a part of an alias's requests goes to."""

    version: int
    percent: float


class AdapterView(msgspec.Struct, frozen=True):
    id: str
    name: str
    created_at: datetime
    aliases: Mapping[str, int]
    canaries: Mapping[str, CanaryView]
    """Of those aliases that are split."""
    versions: list[VersionView]
    object: Literal["adapter"] = "adapter"


class AdapterSummaryView(msgspec.Struct, frozen=True):
    """An adapter in a list; it alone has its versions and their reports."""

    id: str
    tenant: str
    name: str
    num_versions: int
    latest_version: int
    state: str
    """Of the latest version, as are rank and effect."""
    aliases: Mapping[str, int]
    rank: int | None
    """The largest of its matrices; null for one without A and B."""
    bytes: int
    """Stored, of all versions together."""
    effect: float | None
    """By how much it changes the base's logits, as attestation measured it."""
    tier: str
    """The fastest that has one of its versions now: `device`, `host`, or `store`."""
    last_used: datetime | None
    requests: int
    """Of the last 30 days."""
    p95_ms: float | None
    """Of its latest requests, from arrival to the last byte."""
    created_at: datetime
    object: Literal["adapter.summary"] = "adapter.summary"


class ListView(msgspec.Struct, Generic[View], frozen=True):
    data: list[View]
    object: Literal["list"] = "list"


class PageView(msgspec.Struct, Generic[View], frozen=True):
    """A part of a list, in a stable order."""

    data: list[View]
    has_more: bool
    next_after: str | None
    """What to give as `after` for the next page; None on the last one."""
    object: Literal["list"] = "list"


class DeletionView(msgspec.Struct, frozen=True):
    """Of this version nothing is left on the device, in memory, on disk or in the store."""

    version: int
    digest: str
    requested_at: datetime
    finished_at: datetime
    receipt: Mapping[str, Any] | None
    """What was freed where, and which requests it met."""
    object: Literal["adapter.deletion"] = "adapter.deletion"


class DeletionsView(msgspec.Struct, frozen=True):
    """The answer to a deletion: a receipt for each version."""

    adapter: str
    versions: list[DeletionView]
    object: Literal["adapter.deletions"] = "adapter.deletions"


class SpeculationView(msgspec.Struct, frozen=True):
    """How this server guesses tokens."""

    proposers: Sequence[str]
    """What `speculation.proposer` of a request may name."""
    max_draft_tokens: int
    acceptance: str


class BaseView(msgspec.Struct, frozen=True):
    """The base model that adapters must fit."""

    id: str
    base_id: str
    model_type: str
    num_parameters: int
    dtype: str
    quantization: str
    max_model_len: int
    num_modules: int
    targets: list[str]
    """Last parts of the names of the modules that LoRA may target."""
    max_full_matrix_bytes: int
    """What whole matrices of one adapter (`modules_to_save`) may take together; 0 refuses them."""
    refused: Mapping[str, str]
    """Modules that LoRA may not target here, and why."""
    speculation: SpeculationView
    object: Literal["base_model"] = "base_model"
