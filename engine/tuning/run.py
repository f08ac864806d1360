"""One training run, from the loaded base to the adapter's files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import get_cosine_schedule_with_warmup

from ...adapters.json_frames import MessageRefused
from ..config import EngineConfig, Quantization
from ..errors import EngineError
from .adapter import add_adapter, save_adapter, trained_parameters
from .adapter_trainer import AdapterTrainer, Steps
from .base import TunableBase, load_tunable_base
from .batches import Batch, make_batch, on_device
from .checkpoints import Progress, TrainingState
from .connection import Connection
from .errors import BaseNotTunable, InvalidRecipe, InvalidTrainingData, TuningError
from .examples import Examples
from .losses import Loss, dpo_loss, supervised_loss
from .memory_needs import check_fits, limit_device_memory, shapes_of
from .messages import (
    Checkpointed,
    Finished,
    Open,
    Pause,
    Paused,
    Proceed,
    Ready,
    Recipe,
    Stop,
    Stopped,
    Trained,
    Validated,
)
from .methods import Method
from .packing import check_packing
from .step_plan import StepPlan
from .step_shapes import Shapes

WARM_UP = 0.03
"""Share of the steps in which the learning rate rises, before it falls along a cosine."""


def run(order: Open, connection: Connection) -> None:
    """Train, report, and write the adapter. Raises TuningError."""
    recipe = order.recipe
    config = _engine_config(order)
    limit_device_memory(order)
    base = load_tunable_base(config)
    _check_recipe(recipe, base)
    examples, validation = _open_files(order, base)
    plan = StepPlan(
        examples.lengths,
        num_epochs=recipe.num_epochs,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        packed_tokens=recipe.max_tokens if recipe.is_packed else None,
    )
    TrainingRun(order, connection, base, examples, validation, plan).train()


class TrainingRun:
    """The steps of one adapter."""

    def __init__(
        self,
        order: Open,
        connection: Connection,
        base: TunableBase,
        examples: Examples,
        validation: Examples | None,
        plan: StepPlan,
    ) -> None:
        self._order, self._recipe = order, order.recipe
        self._connection = connection
        self._base = base
        self._examples, self._validation = examples, validation
        self._plan = plan
        self._checkpoint_folder = Path(order.checkpoint_folder)
        self._run_id = _run_id(order)
        self._model = add_adapter(base, order.recipe).to(base.device)
        parameters = trained_parameters(self._model)
        self._optimizer = torch.optim.AdamW(
            parameters.values(), lr=order.recipe.learning_rate, weight_decay=0.0
        )
        self._needed_bytes = self._needs(shapes_of(base, parameters.values()))
        self._scheduler = get_cosine_schedule_with_warmup(
            self._optimizer, int(WARM_UP * plan.num_steps), plan.num_steps
        )
        self._state = TrainingState(parameters, self._optimizer, self._scheduler)
        self._step, self._num_tokens, self._loss = 0, 0, math.nan
        self._saved_step = 0
        self._learning_rate = 0.0
        self._is_stopped = False

    def train(self) -> None:
        """Do the steps that no checkpoint has, then write the adapter. Raises TuningError, also if
        a step may need more memory than there is."""
        check_fits(self._needed_bytes, self._order)
        self._restore()
        self._connection.send(
            Ready(
                first_step=self._step,
                num_steps=self._plan.num_steps,
                num_examples=len(self._examples),
                num_trained_tokens=sum(self._examples.lengths) * self._recipe.num_epochs,
                num_tokens=self._num_tokens,
                step_bytes=self._needed_bytes,
            )
        )
        if self._obey() and self._step < self._plan.num_steps:
            self._trainer().train()
        if self._is_stopped:
            self._checkpoint()
            self._connection.send(Stopped(self._step))
            return
        folder, base_name = Path(self._order.result_folder), Path(self._order.model).name
        save_adapter(self._model, folder, base_name=base_name)
        self._connection.send(Finished(self._step, self._num_tokens, self._loss))

    def _needs(self, shapes: Shapes) -> int:
        """Bytes of a step in which all sequences are as long as the longest one."""
        recipe = self._recipe
        width = recipe.max_tokens if recipe.is_packed else self._examples.longest
        return shapes.bytes(num_rows=recipe.batch_size * self._num_ends, width=width)

    @property
    def _num_ends(self) -> int:
        return Method(self._recipe.method).num_ends

    def _trainer(self) -> AdapterTrainer:
        # The Trainer seeds all generators; the run's random numbers go on from its checkpoint.
        with torch.random.fork_rng():
            return AdapterTrainer(
                self._model,
                Steps(self._step, self._plan.num_steps, self._batch),
                loss_of=self._loss_of,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                after_step=self._after_step,
                device=self._base.device,
                seed=self._recipe.seed,
                folder=self._checkpoint_folder,
            )

    def _batch(self, step: int) -> Batch:
        return self._make_batch(self._examples, self._plan.sequences(step))

    def _make_batch(self, examples: Examples, sequences: Sequence[Sequence[int]]) -> Batch:
        read = [[examples[index] for index in sequence] for sequence in sequences]
        rows = [
            [each[end] for each in sequence] for end in range(self._num_ends) for sequence in read
        ]
        return make_batch(rows, is_packed=self._recipe.is_packed)

    def _loss_of(self, model: Any, batch: Batch) -> Loss:
        if self._recipe.method == Method.DPO:
            return dpo_loss(model, batch, self._recipe.dpo_beta)
        return supervised_loss(model, batch)

    def _after_step(self, loss: Loss) -> bool:
        """Report a step, and do what is due after it. Returns whether training goes on."""
        num_tokens = self._plan.num_tokens(self._step)
        self._step += 1
        self._num_tokens += num_tokens
        self._loss = loss.value.item()
        if not math.isfinite(self._loss):
            raise TuningError(
                f"the loss of step {self._step} is not a number; train at a lower learning rate"
            )
        accuracy = loss.num_correct.item() / loss.num_counted
        self._connection.send(
            Trained(self._step, self._loss, self._learning_rate, num_tokens, accuracy)
        )
        self._learning_rate = self._scheduler.get_last_lr()[0]
        if self._validation is not None and self._plan.ends_epoch(self._step):
            self._validate(self._validation)
        is_last = self._step == self._plan.num_steps
        if is_last or self._step % self._recipe.checkpoint_steps == 0:
            self._checkpoint()
        return self._obey()

    def _validate(self, examples: Examples) -> None:
        """Report the mean loss over the whole validation file."""
        self._model.eval()
        size = self._recipe.batch_size
        total, num_correct, num_counted = 0.0, 0.0, 0
        with torch.no_grad():
            for start in range(0, len(examples), size):
                indices = range(start, min(start + size, len(examples)))
                batch = self._make_batch(examples, [[index] for index in indices])
                loss = self._loss_of(self._model, on_device(batch, self._base.device))
                total += loss.value.item() * loss.num_counted
                num_correct += loss.num_correct.item()
                num_counted += loss.num_counted
        self._connection.send(Validated(self._step, total / num_counted, num_correct / num_counted))

    def _checkpoint(self) -> None:
        if self._saved_step == self._step:
            return
        path = self._state.save(
            self._checkpoint_folder,
            Progress(self._run_id, self._step, self._num_tokens, self._loss),
        )
        self._saved_step = self._step
        self._connection.send(Checkpointed(self._step, str(path), self._num_tokens))

    def _restore(self) -> None:
        progress = self._state.restore(self._checkpoint_folder, run_id=self._run_id)
        if progress is not None:
            self._step = self._saved_step = progress.step
            self._num_tokens, self._loss = progress.num_tokens, progress.loss
        self._learning_rate = self._scheduler.get_last_lr()[0]

    def _obey(self) -> bool:
        """Carry out the orders that have arrived. Returns whether training goes on."""
        while (order := self._connection.poll()) is not None:
            if isinstance(order, Pause):
                self._connection.send(Paused())
                while isinstance(order, Pause):
                    order = self._connection.receive()
            if isinstance(order, Stop):
                self._is_stopped = True
                return False
            if not isinstance(order, Proceed):
                raise MessageRefused(f"{type(order).__name__} came during training")
        return True


def _engine_config(order: Open) -> EngineConfig:
    """Raises BaseNotTunable if the engine does not know these settings."""
    try:
        return EngineConfig(
            order.model,
            device=order.device,
            dtype=order.dtype,
            quantization=Quantization(order.quantization),
            quantization_group_size=order.quantization_group_size,
            quantization_exclude=order.quantization_exclude,
            embedding_quantization=Quantization(order.embedding_quantization),
        )
    except (ValueError, EngineError) as exc:
        raise BaseNotTunable(f"the base's settings are not the engine's: {exc}") from exc


def _check_recipe(recipe: Recipe, base: TunableBase) -> None:
    """Raises InvalidRecipe."""
    if recipe.method not in tuple(Method):
        raise InvalidRecipe(f"the method {recipe.method} is not one of {' and '.join(Method)}")
    for name in ("rank", "num_epochs", "batch_size", "checkpoint_steps"):
        if getattr(recipe, name) < 1:
            raise InvalidRecipe(f"{name} is less than 1")
    if not (0 < recipe.learning_rate < math.inf and 0 < recipe.alpha < math.inf):
        raise InvalidRecipe("learning_rate and alpha have to be positive numbers")
    if not 2 <= recipe.max_tokens <= base.max_model_len:
        raise InvalidRecipe(f"max_tokens is not from 2 to the base's {base.max_model_len}")
    if recipe.method == Method.DPO and not 0 < recipe.dpo_beta < math.inf:
        raise InvalidRecipe("dpo_beta has to be a positive number")
    if recipe.is_packed:
        if recipe.method == Method.DPO:
            raise InvalidRecipe("pairs of dpo are not packed")
        check_packing(base)


def _open_files(order: Open, base: TunableBase) -> tuple[Examples, Examples | None]:
    """Raises InvalidTrainingData."""
    open_file = partial(
        Examples,
        tokenizer=base.tokenizer,
        method=order.recipe.method,
        max_tokens=order.recipe.max_tokens,
    )
    examples = open_file(Path(order.training_file))
    if order.validation_file is None:
        return examples, None
    try:
        return examples, open_file(Path(order.validation_file))
    except InvalidTrainingData as exc:
        raise InvalidTrainingData(f"validation file: {exc}", exc.line) from exc


def _run_id(order: Open) -> str:
    """SHA-256 over what decides the adapter, wherever the files are."""
    digest = hashlib.sha256(msgspec.json.encode(order.recipe))
    settings = (
        order.quantization,
        order.quantization_group_size,
        order.quantization_exclude,
        order.embedding_quantization,
        order.dtype,
    )
    digest.update(msgspec.json.encode(settings))
    with open(order.training_file, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
