"""Checkpoints of a training run: one safetensors file each, with JSON in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint_files import newest_whole, publish_checkpoint
from .errors import TuningError

_UNFINISHED = ".unfinished"
_STATE = "state"
"""The metadata's entry."""
_RANDOM_CPU, _RANDOM_DEVICE = "random.cpu", "random.device"


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run is."""

    run_id: str
    """Names recipe and data: only the same run resumes from a checkpoint."""
    step: int
    num_tokens: int
    loss: float
    """Of the last step."""


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint holds beside tensors."""

    progress: Progress
    optimizer_groups: list[dict[str, Any]]
    scheduler: dict[str, Any]


class TrainingState:
    """Everything that a step changes."""

    def __init__(self, parameters: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> None:
        """parameters: those that are trained."""
        self._parameters = parameters
        self._optimizer = optimizer
        self._scheduler = scheduler

    def save(self, folder: Path, progress: Progress) -> Path:
        """Write a checkpoint, and remove those before the last two."""
        optimizer = self._optimizer.state_dict()
        state = _Saved(progress, optimizer["param_groups"], self._scheduler.state_dict())
        unfinished = folder / _UNFINISHED
        metadata = {_STATE: msgspec.json.encode(state).decode()}
        save_file(self._tensors(optimizer["state"]), unfinished, metadata=metadata)
        return publish_checkpoint(unfinished, folder, progress.step).path

    def restore(self, folder: Path, *, run_id: str) -> Progress | None:
        """Continue from the newest checkpoint in the folder that is whole; None: there is none.
        Raises TuningError if it is another run's."""
        checkpoint = newest_whole(folder)
        if checkpoint is None:
            return None
        with safe_open(checkpoint.path, framework="pt") as file:
            state = msgspec.json.decode(file.metadata()[_STATE], type=_Saved)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if state.progress.run_id != run_id:
            raise TuningError("the checkpoints belong to another recipe, base or file")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"parameter.{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                index, _, moment = rest.partition(".")
                moments.setdefault(int(index), {})[moment] = tensor
        self._optimizer.load_state_dict({"state": moments, "param_groups": state.optimizer_groups})
        self._scheduler.load_state_dict(state.scheduler)
        torch.set_rng_state(tensors[_RANDOM_CPU])
        if _RANDOM_DEVICE in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors[_RANDOM_DEVICE])
        return state.progress

    def _tensors(self, moments: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        tensors = {f"parameter.{name}": each.detach() for name, each in self._parameters.items()}
        for index, of_parameter in moments.items():
            for name, tensor in of_parameter.items():
                tensors[f"optimizer.{index}.{name}"] = tensor
        tensors[_RANDOM_CPU] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[_RANDOM_DEVICE] = torch.cuda.get_rng_state()
        return {name: tensor.contiguous() for name, tensor in tensors.items()}
