"""The actor of a trainer: runs the confined process on the node where Ray has placed it. Needs no
Ray itself."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from ...engine.checkpoint.base_identity import compute_base_id
from ...engine.tuning.environment import trainer_environment
from ...engine.tuning.errors import BaseNotTunable
from ...engine.tuning.messages import Failed, FromTrainer, Open, ToTrainer
from ..settings import load_settings
from ..tuning.trainer import Trainer
from ..tuning.trainer_place import TrainerPlace
from .trainer_folder import TrainerFolder

CHUNK_BYTES = 16 << 20
"""Of a file, in one Ray object."""


class TrainerActor:
    """One trainer, from the first byte of its data to its end."""

    def __init__(self) -> None:
        self._folder = TrainerFolder(load_settings().data_dir / "trainers")
        self._work = self._folder.work
        self._trainer: Trainer | None = None

    async def node(self) -> str:
        """The name of the machine."""
        return socket.gethostname()

    async def write(self, name: str, chunk: bytes) -> None:
        """Append to a file of the folder. Raises OSError."""
        with (self._work.path / name).open("ab") as file:
            await asyncio.to_thread(file.write, chunk)

    async def read(self, name: str, offset: int) -> bytes:
        """At most CHUNK_BYTES of a file of the folder; none at its end. Raises OSError, also for a
        link: the trainer could make one to a file that it must not read."""
        return await asyncio.to_thread(_read, self._work.path / name, offset)

    async def start(self, order: Open, base_id: str, module: str) -> Failed | None:
        """Start a trainer with the files that were written. Returns why this node has another base.
        Raises OSError.

        order: with the server's paths, of which that of the base is the same here. module: of the
        trainer process.
        """
        if failure := await asyncio.to_thread(_check_base, Path(order.model), base_id):
            return failure
        self._trainer = await Trainer.spawn(
            (sys.executable, "-P", "-m", module),
            environment=trainer_environment(os.environ),
            folder=self._work.path,
        )
        self._trainer.send(self._of_this_node(order))
        return None

    async def hear(self) -> AsyncIterator[FromTrainer]:
        """What the trainer says, until it ends. Raises MessageRefused."""
        async for message in self._running.receive():
            yield message

    async def tell(self, message: ToTrainer) -> None:
        """Send it to the trainer."""
        self._running.send(message)

    async def close(self) -> int:
        """End the trainer and remove its folder; returns its exit status, negative for a signal, or
        1 if none was started."""
        status = 1 if self._trainer is None else await self._trainer.close()
        self._folder.close()
        return status

    @property
    def _running(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _of_this_node(self, order: Open) -> Open:
        """With the paths of this node, and no more memory than it has."""
        most = (order.max_memory_bytes, TrainerPlace(order.device).address_bytes())
        work, has_validation = self._work, order.validation_file is not None
        return msgspec.structs.replace(
            order,
            training_file=str(work.training_file),
            validation_file=str(work.validation_file) if has_validation else None,
            checkpoint_folder=str(work.checkpoints),
            result_folder=str(work.result),
            max_memory_bytes=min((each for each in most if each is not None), default=None),
        )


def _check_base(model: Path, base_id: str) -> Failed | None:
    """Whether the folder has the base of this id. Reads every shard once."""
    node = socket.gethostname()
    if not (model / "config.json").exists():
        reason = f"the Ray node {node} has no base at {model}"
    elif compute_base_id(model) != base_id:
        reason = f"{model} on the Ray node {node} is not the base that is served"
    else:
        return None
    return Failed(BaseNotTunable.code, reason)


def _read(path: Path, offset: int) -> bytes:
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        return os.pread(opened, CHUNK_BYTES, offset)
    finally:
        os.close(opened)
