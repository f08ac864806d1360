"""Schemas of `/v1/fine_tuning/jobs`, those of OpenAI's API with the field `lora`. Moments are
seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from ...adapters.peft_config import MAX_RANK
from ..contract.answer_model import AnswerModel
from ..contract.request_model import RequestModel
from .batches import FileId, Label, LabelValue

Auto = Literal["auto"]
MAX_EPOCHS, MAX_BATCH_SIZE, MAX_MULTIPLIER = 50, 256, 100.0
MAX_SEED = 2**31 - 1

Target = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class HyperparametersBody(RequestModel):
    """How long and how fast to train; `auto` is the same as not sent."""

    n_epochs: Auto | Annotated[int, Field(ge=1, le=MAX_EPOCHS)] = "auto"
    """Passes over the data; by default 3."""
    batch_size: Auto | Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)] = "auto"
    """Sequences in a step; by default 8."""
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0, le=MAX_MULTIPLIER)] = "auto"
    """Times the method's own learning rate; by default 1."""


class DpoHyperparametersBody(HyperparametersBody):
    """The same for DPO."""

    beta: Auto | Annotated[float, Field(gt=0, le=10)] = "auto"
    """Penalty for leaving the base model; by default 0.1."""


class SupervisedBody(RequestModel):
    """Training on answers."""

    hyperparameters: HyperparametersBody | None = None


class DpoBody(RequestModel):
    """Training on pairs of a preferred and another answer."""

    hyperparameters: DpoHyperparametersBody | None = None


class MethodBody(RequestModel):
    """The method, and its hyperparameters under its name."""

    type: Literal["supervised", "dpo"]
    supervised: SupervisedBody | None = None
    dpo: DpoBody | None = None


class LoraBody(RequestModel):
    """The shape of the adapter."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 16
    alpha: Annotated[float, Field(gt=0, le=65536)] | None = None
    """By default twice the rank."""
    targets: Annotated[list[Target], Field(max_length=64)] | None = None
    """Modules as in PEFT's `target_modules`; by default all linear ones."""
    rslora: bool = False
    dora: bool = False
    packing: bool = False
    """Several examples in one sequence. DPO has none."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a sequence; by default 2048, or what the base serves if that is less."""


class TuningJobBody(RequestModel):
    """A job to create."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """The base model."""
    training_file: FileId
    """A file of the purpose `fine-tune`."""
    validation_file: FileId | None = None
    method: MethodBody | None = None
    """By default `supervised`."""
    hyperparameters: HyperparametersBody | None = None
    """Those of `supervised`, in OpenAI's older form."""
    suffix: Name | None = None
    """The adapter of which the result becomes a version."""
    adapter: Name | None = None
    """The same as `suffix`."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """By default a random one."""
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=16)] | None = None
    """The caller's own; returned unchanged."""
    lora: LoraBody | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"integrations": ([],)}
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {
            "model": "tiny",
            "training_file": "file-0123456789abcdef0123456789abcdef",
            "method": {
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 3}},
            },
            "suffix": "support-bot",
            "lora": {"rank": 16},
        },
    )


@dataclass(frozen=True, slots=True)
class HyperparametersView(AnswerModel):
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None = None
    """Of `dpo`."""


@dataclass(frozen=True, slots=True)
class MethodOptionsView(AnswerModel):
    hyperparameters: HyperparametersView


@dataclass(frozen=True, slots=True)
class MethodView(AnswerModel):
    type: str
    supervised: MethodOptionsView | None
    dpo: MethodOptionsView | None


@dataclass(frozen=True, slots=True)
class LoraView(AnswerModel):
    rank: int
    alpha: float
    targets: list[str]
    """Empty: all linear modules."""
    rslora: bool
    dora: bool
    packing: bool
    max_tokens: int


@dataclass(frozen=True, slots=True)
class JobErrorView(AnswerModel):
    code: str
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class TuningJobView(AnswerModel):
    id: str
    model: str
    """The base model."""
    adapter: str
    """The adapter of which the result becomes a version."""
    status: str
    """`queued`, `running`, `paused`, `succeeded`, `failed` or `cancelled`."""
    pause_reason: str | None
    """Why it is paused: `requested`, `trained_tokens` or `budget`; null: it is not paused."""
    fine_tuned_model: str | None
    """The model name of the result, such as `support-bot@3`; null until the job has succeeded."""
    training_file: str
    validation_file: str | None
    method: MethodView
    hyperparameters: HyperparametersView
    lora: LoraView
    seed: int
    step: int
    """The last step that is counted."""
    num_steps: int
    """0 until the data is read."""
    trained_tokens: int
    """Tokens of these steps."""
    created_at: int
    started_at: int | None
    finished_at: int | None
    error: JobErrorView | None
    organization_id: str
    """The tenant's slug."""
    metadata: Mapping[str, str] | None
    result_files: Sequence[str] = ()
    estimated_finish: None = None
    integrations: None = None
    object: Literal["fine_tuning.job"] = "fine_tuning.job"


@dataclass(frozen=True, slots=True)
class TuningEventView(AnswerModel):
    id: str
    level: str
    """`info`, `warn` or `error`."""
    message: str
    type: str
    """`message`, or `metrics` with figures in `data`."""
    data: Mapping[str, Any] | None
    """Of `metrics`: `step`, `total_steps`, and the figures of the step."""
    created_at: int
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"


@dataclass(frozen=True, slots=True)
class CheckpointMetrics(AnswerModel):
    """Figures of the step; null: not measured."""

    step: int
    train_loss: float | None
    train_mean_token_accuracy: float | None
    valid_loss: float | None
    valid_mean_token_accuracy: float | None


@dataclass(frozen=True, slots=True)
class TuningCheckpointView(AnswerModel):
    id: str
    fine_tuning_job_id: str
    step_number: int
    metrics: CheckpointMetrics
    created_at: int
    fine_tuned_model_checkpoint: None = None
    """Checkpoints are for resuming the job; they are not served."""
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
