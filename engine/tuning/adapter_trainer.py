"""transformers' Trainer, given the rest of a run's steps.

The run decides the order of the data, keeps the checkpoints and talks to the server. The Trainer
never resumes by itself, because its own checkpoints are pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from .batches import Batch
from .losses import Loss

MAX_GRADIENT_NORM = 1.0


class Steps(Dataset[dict[str, Any]]):
    """The batches of the remaining steps, made when they are needed."""

    def __init__(self, first: int, end: int, batch_of: Callable[[int], Batch]) -> None:
        self._first, self._end = first, end
        self._batch_of = batch_of

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._batch_of(self._first + index)._asdict()


class AdapterTrainer(Trainer):  # type: ignore[misc]
    """Trains the parameters that need gradients, one batch per step."""

    def __init__(
        self,
        model: Any,
        steps: Steps,
        *,
        loss_of: Callable[[Any, Batch], Loss],
        optimizer: Any,
        scheduler: Any,
        after_step: Callable[[Loss], bool],
        device: torch.device,
        seed: int,
        folder: Path,
    ) -> None:
        """after_step: returns whether training goes on. folder: nothing is written to it."""
        self._loss_of = loss_of
        self._last: Loss | None = None
        super().__init__(
            model=model,
            args=TrainingArguments(
                output_dir=str(folder),
                max_steps=len(steps),
                max_grad_norm=MAX_GRADIENT_NORM,
                seed=seed,
                use_cpu=device.type == "cpu",
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=steps,
            optimizers=(optimizer, scheduler),
            callbacks=[_AfterStep(lambda: after_step(self.last_loss))],
        )
        self.remove_callback(PrinterCallback)

    @property
    def last_loss(self) -> Loss:
        """Of the last step."""
        assert self._last is not None, "a step is done"
        return self._last

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The steps in their order. Its own generator: the run's random numbers do not depend on
        how often iteration begins."""
        return DataLoader(self.train_dataset, batch_size=None, generator=torch.Generator())

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The loss of the batch; `last_loss` keeps it without its gradient."""
        loss = self._loss_of(model, Batch(**inputs))
        self._last = loss._replace(value=loss.value.detach())
        return loss.value


class _AfterStep(TrainerCallback):  # type: ignore[misc]
    def __init__(self, goes_on: Callable[[], bool]) -> None:
        self._goes_on = goes_on

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._goes_on():
            control.should_training_stop = True
