"""Checkpoints of a training run: safetensors and JSON.

A checkpoint is written into a folder with a temporary name, brought to the disk, and renamed. So a
folder with a checkpoint's name is whole, whenever the process was killed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...adapters.durable import sync_directory
from .errors import TuningError

NUM_KEPT = 2
_NAME = re.compile(r"step-(\d{1,12})")
_UNFINISHED = ".unfinished"
_STATE, _TENSORS = "state.json", "state.safetensors"
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
        unfinished, path = folder / _UNFINISHED, folder / f"step-{progress.step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        save_file(self._tensors(optimizer["state"]), unfinished / _TENSORS)
        (unfinished / _STATE).write_bytes(msgspec.json.encode(state))
        publish(unfinished, path)
        for _, old in _checkpoints(folder)[:-NUM_KEPT]:
            shutil.rmtree(old)
        return path

    def restore(self, folder: Path, *, run_id: str) -> Progress | None:
        """Continue from the last checkpoint in the folder; None: there is none. Raises TuningError
        if it is another run's."""
        checkpoints = _checkpoints(folder)
        if not checkpoints:
            return None
        _, path = checkpoints[-1]
        state = msgspec.json.decode((path / _STATE).read_bytes(), type=_Saved)
        if state.progress.run_id != run_id:
            raise TuningError("the checkpoints belong to another recipe, base or file")
        tensors = load_file(path / _TENSORS)
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


def publish(unfinished: Path, path: Path) -> None:
    """Bring a folder and its files to the disk, and give it its name. Replaces one of the same
    name."""
    for file in unfinished.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    sync_directory(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    sync_directory(path.parent)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The whole ones, by ascending step."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)
