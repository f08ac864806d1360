"""The work of one trainer process on a job, from its start to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from ...adapters.json_frames import MessageRefused
from ...engine.config import EngineConfig
from ...engine.process.engine import Engine
from ...engine.tuning.messages import (
    Checkpointed,
    Failed,
    Finished,
    FromTrainer,
    Open,
    Pause,
    Proceed,
    Ready,
    Recipe,
    Stop,
    Stopped,
    Trained,
    Validated,
    Waiting,
)
from ...platform.errors import PlatformError, TuningJobNotFound
from ...platform.tuning import service
from ...platform.tuning.models import TuningJob
from ...platform.tuning.service import Checkpoint, Happened, Progress
from ...platform.tuning.states import JobState
from ..control_plane.control_plane import ControlPlane
from ..telemetry.metrics import Metrics
from ..telemetry.trainer_memories import TrainerMemories
from .checkpoint_store import CheckpointStore
from .checkpoint_uploads import CheckpointUploads
from .token_count import TokenCount
from .trainer import Trainer
from .trainer_place import TrainerPlace
from .turns import Turns
from .work_folders import WorkFolder

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.25
"""How often the engine is looked at."""
REPORT_SECONDS = 1.0
"""How often progress is written to the database, and the job's state read."""
STOP_SECONDS = 60.0
"""A trainer that has not stopped by then is killed; its last checkpoint stays."""
STALL_SECONDS = 3600.0
"""A trainer that may run and says nothing for this long is killed."""
MIB = 1 << 20
MAX_METRICS = 300
"""Events with the figures of a step, of one job; the steps between are left out."""

LastWord = Finished | Failed | Stopped


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """What all trainers of a server have in common."""

    command: Sequence[str]
    environment: Mapping[str, str]
    model: Path
    config: EngineConfig
    """Of the engine: its trainers train on the values that it serves."""
    engine: Engine
    place: TrainerPlace
    memories: TrainerMemories = field(default_factory=TrainerMemories)


class Attempt:
    """One trainer of a job whose lease this server has."""

    def __init__(
        self,
        setup: TrainerSetup,
        control_plane: ControlPlane,
        metrics: Metrics,
        job: TuningJob,
        folder: WorkFolder,
        checkpoints: CheckpointStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job
        """As of the last report."""
        self.status = 0
        """The exit status of the trainer that has ended."""
        self._setup = setup
        self._control_plane = control_plane
        self._metrics = metrics
        self._folder = folder
        self._uploads = CheckpointUploads(checkpoints, job, folder)
        self._clock = clock
        self._count = TokenCount(job.step, job.num_tokens)
        self._num_steps = job.num_steps
        self._events: list[Happened] = []
        self._checkpoints: list[Checkpoint] = []
        self._trained: Trained | None = None
        self._validated: Validated | None = None
        self._has_waited = False
        self._heard_at = 0.0
        self._stop_at: float | None = None
        """When the trainer was told to stop."""

    async def run(self) -> LastWord | None:
        """The trainer's last word; None: it ended without one, or was killed. Raises OSError or a
        PlatformError."""
        trainer = await Trainer.spawn(
            self._setup.command, environment=self._setup.environment, folder=self._folder.path
        )
        self._heard_at = self._clock()
        memories, job = self._setup.memories, self.job
        pid = trainer.pid if self._setup.place.is_here else None
        memories.add(job.id, pid=pid, tenant_id=job.tenant_id, adapter=job.adapter_name)
        trainer.send(self._open())
        async with self._uploads.running():
            watch = asyncio.create_task(self._watch(trainer))
            try:
                last_word = await self._hear(trainer)
            finally:
                watch.cancel()
                await asyncio.wait([watch])
                memories.remove(job.id)
                self.status = await trainer.close()
            await self._report()
        if isinstance(last_word, Stopped):
            await self._uploads.store_last()
        return last_word

    def _open(self) -> Open:
        has_validation = self.job.validation_file_id is not None
        config, place = self._setup.config, self._setup.place
        return Open(
            model=str(self._setup.model),
            quantization=str(config.quantization),
            quantization_group_size=config.quantization_group_size,
            quantization_exclude=tuple(config.quantization_exclude),
            embedding_quantization=str(config.embedding_quantization),
            # The trainer's device might choose another one.
            dtype=self._setup.engine.info.dtype,
            device=place.device,
            recipe=msgspec.convert(self.job.recipe, Recipe),
            training_file=str(self._folder.training_file),
            validation_file=str(self._folder.validation_file) if has_validation else None,
            checkpoint_folder=str(self._folder.checkpoints),
            result_folder=str(self._folder.result),
            max_memory_bytes=place.address_bytes(),
            max_device_bytes=place.device_bytes(),
            cpus=place.cpus,
        )

    # --- what the trainer says --------------------------------------------------------------------

    async def _hear(self, trainer: Trainer) -> LastWord | None:
        try:
            async for message in trainer.receive():
                self._heard_at = self._clock()
                self._note(message)
                if isinstance(message, Finished | Failed | Stopped):
                    return message
        except MessageRefused as exc:
            log.warning("trainer_refused", job=self.job.id, error=str(exc))
        return None

    def _note(self, message: FromTrainer) -> None:
        match message:
            case Waiting():
                self._note_waiting()
            case Ready():
                self._note_ready(message)
            case Trained():
                self._note_trained(message)
            case Validated():
                self._validated = message
                figures = {
                    "valid_loss": message.loss,
                    "valid_mean_token_accuracy": message.accuracy,
                }
                self._note_figures(message.step, "validation", message.loss, figures)
            case Checkpointed():
                self._note_checkpoint(message)
            case Finished():
                self._count.note_total(message.step, message.num_tokens)
                self._events.append(Happened("The training is complete."))

    def _note_waiting(self) -> None:
        if not self._has_waited:
            self._has_waited = True
            self._events.append(Happened("The trainer waits for a machine."))

    def _note_ready(self, message: Ready) -> None:
        self._num_steps = message.num_steps
        self._setup.memories.note_step(self.job.id, message.step_bytes)
        self._count.note_total(message.first_step, message.num_tokens)
        text = f"{message.num_steps} steps, {message.num_examples} examples"
        if message.step_bytes:
            text += f", at most about {-(-message.step_bytes // MIB)} MiB for a step"
        if message.first_step:
            text = f"Training goes on after step {message.first_step}: {text}."
        else:
            text = f"Training begins: {text}."
        self._events.append(Happened(text))

    def _note_trained(self, message: Trained) -> None:
        is_new = message.step > self._count.step
        self._trained = message
        self._count.note_step(message.step, message.num_tokens)
        stride = max(1, self._num_steps // MAX_METRICS)
        if is_new and (message.step % stride == 0 or message.step in {1, self._num_steps}):
            figures = {
                "train_loss": message.loss,
                "train_mean_token_accuracy": message.accuracy,
                "learning_rate": message.learning_rate,
            }
            self._note_figures(message.step, "training", message.loss, figures)

    def _note_figures(
        self, step: int, kind: str, loss: float, figures: dict[str, float | None]
    ) -> None:
        data = {"step": step, "total_steps": self._num_steps, **figures}
        text = f"Step {step}/{self._num_steps}: {kind} loss={loss:.4f}"
        self._events.append(Happened(text, data=data))

    def _note_checkpoint(self, message: Checkpointed) -> None:
        self._count.note_total(message.step, message.num_tokens)
        self._uploads.note()
        trained, validated = self._trained, self._validated
        self._checkpoints.append(
            Checkpoint(
                message.step,
                trained.loss if trained else None,
                trained.accuracy if trained else None,
                validated.loss if validated else None,
                validated.accuracy if validated else None,
            )
        )

    # --- what the server says ---------------------------------------------------------------------

    async def _watch(self, trainer: Trainer) -> None:
        """Let it pause while the engine is busy, and end when its owner asks for that."""
        now = self._clock()
        turns, is_running, reported_at = Turns(now), True, now
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            if (may_train := turns.decide(now, is_busy=self._is_engine_busy())) != is_running:
                is_running = may_train
                trainer.send(Proceed() if is_running else Pause())
                self._heard_at = now
            if now - reported_at >= REPORT_SECONDS:
                reported_at = now
                await self._report_if_possible(trainer)
                self._obey(trainer, now)
            if is_running and now - self._heard_at > STALL_SECONDS:
                log.warning("trainer_stalled", job=self.job.id)
                trainer.kill()

    def _is_engine_busy(self) -> bool:
        if not self._setup.place.shares_engine:
            return False
        stats = self._setup.engine.stats
        return stats is None or stats.num_running + stats.num_waiting > 0

    def _obey(self, trainer: Trainer, now: float) -> None:
        """Do what the job's owner asked for."""
        if self.job.state is JobState.RUNNING:
            return
        if self.job.state is not JobState.PAUSED:
            trainer.kill()
        elif self._stop_at is None:
            self._stop_at = now
            trainer.send(Stop())
        elif now - self._stop_at > STOP_SECONDS:
            trainer.kill()

    async def _report_if_possible(self, trainer: Trainer) -> None:
        try:
            await self._report()
        except TuningJobNotFound:  # its tenant is being deleted
            trainer.kill()
        except PlatformError as exc:
            log.warning("job_progress_not_written", job=self.job.id, error=str(exc))

    async def _report(self) -> None:
        """Write what happened since the last report. Raises a PlatformError: it is kept."""
        events, checkpoints = self._events[:], self._checkpoints[:]
        progress = Progress(
            step=self._count.step,
            num_tokens=self._count.num_tokens,
            num_steps=self._num_steps,
            events=events,
            checkpoints=checkpoints,
        )
        before, job_id = self.job.num_tokens, self.job.id
        self.job = await self._control_plane.write(
            self.job.tenant_id, lambda session: service.record(session, job_id, progress)
        )
        del self._events[: len(events)], self._checkpoints[: len(checkpoints)]
        self._metrics.tuning.note_tokens(max(0, self.job.num_tokens - before))
