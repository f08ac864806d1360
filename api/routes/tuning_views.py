"""Converts rows of fine-tuning jobs to API views."""

from __future__ import annotations

from datetime import datetime

import msgspec

from ...engine.tuning.messages import Recipe
from ...platform.tuning.models import TuningCheckpoint, TuningEvent, TuningJob
from ..schemas.tuning import (
    CheckpointMetrics,
    HyperparametersView,
    JobErrorView,
    LoraView,
    MethodOptionsView,
    MethodView,
    TuningCheckpointView,
    TuningEventView,
    TuningJobView,
)
from ..tuning.recipes import LEARNING_RATES


def job_view(job: TuningJob, *, base_name: str, tenant_slug: str) -> TuningJobView:
    recipe = msgspec.convert(job.recipe, Recipe)
    is_dpo = recipe.method == "dpo"
    hyperparameters = HyperparametersView(
        n_epochs=recipe.num_epochs,
        batch_size=recipe.batch_size,
        learning_rate_multiplier=round(recipe.learning_rate / LEARNING_RATES[recipe.method], 9),
        beta=recipe.dpo_beta if is_dpo else None,
    )
    options = MethodOptionsView(hyperparameters)
    error = None
    if job.error_code is not None:
        error = JobErrorView(job.error_code, job.error_message or "", job.error_param)
    return TuningJobView(
        id=job.id,
        model=base_name,
        adapter=job.adapter_name,
        status=job.state,
        pause_reason=job.pause_reason,
        fine_tuned_model=None if job.version is None else f"{job.adapter_name}@{job.version}",
        training_file=job.training_file_id,
        validation_file=job.validation_file_id,
        method=MethodView(recipe.method, None if is_dpo else options, options if is_dpo else None),
        hyperparameters=hyperparameters,
        lora=LoraView(
            rank=recipe.rank,
            alpha=recipe.alpha,
            targets=list(recipe.targets),
            rslora=recipe.is_rslora,
            dora=recipe.is_dora,
            packing=recipe.is_packed,
            max_tokens=recipe.max_tokens,
        ),
        seed=recipe.seed,
        step=job.step,
        num_steps=job.num_steps,
        trained_tokens=job.num_tokens,
        created_at=int(job.created_at.timestamp()),
        started_at=_seconds(job.started_at),
        finished_at=_seconds(job.ended_at),
        error=error,
        organization_id=tenant_slug,
        metadata=job.labels,
    )


def event_view(event: TuningEvent) -> TuningEventView:
    return TuningEventView(
        id=event.id,
        level=event.level,
        message=event.message,
        type=event.kind,
        data=event.data,
        created_at=int(event.created_at.timestamp()),
    )


def checkpoint_view(checkpoint: TuningCheckpoint) -> TuningCheckpointView:
    return TuningCheckpointView(
        id=checkpoint.id,
        fine_tuning_job_id=checkpoint.job_id,
        step_number=checkpoint.step,
        metrics=CheckpointMetrics(
            step=checkpoint.step,
            train_loss=checkpoint.train_loss,
            train_mean_token_accuracy=checkpoint.train_accuracy,
            valid_loss=checkpoint.valid_loss,
            valid_mean_token_accuracy=checkpoint.valid_accuracy,
        ),
        created_at=int(checkpoint.created_at.timestamp()),
    )


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
