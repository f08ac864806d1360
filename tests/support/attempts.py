"""Attempts of a test: their job, their server's setup and their folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from loraplex.api.schemas.tuning import TuningJobBody
from loraplex.api.tuning.attempt import TrainerSetup
from loraplex.api.tuning.recipes import resolve_recipe
from loraplex.api.tuning.trainer_place import TrainerPlace
from loraplex.engine.config import EngineConfig
from loraplex.engine.tuning.environment import trainer_environment
from loraplex.platform.base import utc_now
from loraplex.platform.database import Database
from loraplex.platform.tuning.models import TuningJob
from loraplex.platform.tuning.states import JobState
from support.catalog import make_tenant

COMMAND = (sys.executable, "-P", "-m", "support.fake_trainer")
INFO = SimpleNamespace(device="cpu", dtype="float32")


def make_job(database: Database) -> TuningJob:
    tenant = make_tenant(database, "acme")
    asked = {"model": "tiny", "training_file": "file-1", "hyperparameters": {"n_epochs": 1}}
    body = TuningJobBody.model_validate(asked)
    info: Any = SimpleNamespace(max_model_len=64, layout=SimpleNamespace(slices=[]))
    with database.transaction(tenant.id) as session:
        job = TuningJob(
            id="ftjob-1",
            adapter_name="bot",
            created_by="key:ci",
            training_file_id="file-1",
            training_sha256="0" * 64,
            recipe=msgspec.to_builtins(resolve_recipe(body, info)),
            state=JobState.RUNNING,
            num_steps=0,
            step=0,
            num_tokens=0,
            num_restarts=0,
            created_at=utc_now(),
        )
        session.add(job)
    return job


def setup_of(base: Path, engine: Any, place: TrainerPlace = TrainerPlace("cpu")) -> TrainerSetup:
    environment = trainer_environment(os.environ)
    return TrainerSetup(COMMAND, environment, base, EngineConfig(str(base)), engine, place)
