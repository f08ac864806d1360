"""The relay: `python -m loraplex.api.ray.trainer_relay ADDRESS BASE_ID NUM_CPUS`.

To the server it is a trainer: it speaks the messages of `engine/tuning/messages.py` on its standard
input, and reads and writes the files that Open names. The trainer itself runs on a node of the Ray
cluster at ADDRESS. When the relay ends, for whatever reason, Ray ends the actor and its trainer.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import ray

from ...adapters.durable import sync_directory
from ...adapters.json_frames import MessageRefused
from ...adapters.logs import log_to_stderr
from ...engine.tuning.checkpoint_files import newest_whole, publish_checkpoint
from ...engine.tuning.connection import Connection
from ...engine.tuning.messages import (
    Checkpointed,
    Finished,
    FromTrainer,
    Open,
    Stop,
    Stopped,
    Waiting,
)
from ..tuning.trainer_place import MAPPED_BYTES
from ..tuning.work_folders import WorkFolder
from .cluster import ClusterRefused, connect
from .trainer_actor import CHUNK_BYTES, TrainerActor

TRAINER_MODULE = "loraplex.engine.tuning.process"
CONNECT_SECONDS = 10.0
"""Before another attempt to reach the cluster."""
REPORT_SECONDS = 10.0
"""How often the server hears that the trainer waits."""

_log = logging.getLogger("loraplex.api.ray.trainer_relay")  # its own name is "__main__"


def main(module: str = TRAINER_MODULE) -> Never:
    """Relay one trainer. `module`: of its process."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a trainer
    address, base_id, num_cpus = sys.argv[1:]
    connection = Connection(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    try:
        order = connection.receive()
        if not isinstance(order, Open):
            raise MessageRefused(f"{type(order).__name__} came before Open")
        relay = Relay(connection, order)
        relay.connect(address)
        status = relay.run(base_id, module, num_cpus=int(num_cpus))
    except (ray.exceptions.RayError, MessageRefused, OSError) as exc:
        _log.warning("trainer_lost", extra={"error": str(exc)})  # the server starts another one
        os._exit(1)
    os._exit(status if status >= 0 else 128 - status)  # as shells do for a signal


class Relay:
    """One trainer. Until it has begun, the server hears that it waits, and can pause the job."""

    def __init__(self, connection: Connection, order: Open) -> None:
        """Orders are obeyed from now on; the process ends when the server is gone."""
        self._connection = connection
        self._order = order
        self._checkpoints, self._result = Path(order.checkpoint_folder), Path(order.result_folder)
        self._actor: Any = None
        self._has_begun = False
        threading.Thread(target=self._obey, daemon=True).start()

    def connect(self, address: str) -> None:
        """Return when the cluster is reached. One that is not protected is not used."""
        while True:
            try:
                connect(address)
                return
            except ClusterRefused as exc:
                _log.warning("ray_not_reached", extra={"error": str(exc)})
            self._connection.send(Waiting())
            time.sleep(CONNECT_SECONDS)

    def run(self, base_id: str, module: str, *, num_cpus: int) -> int:
        """The exit status of the trainer, negative for a signal. Raises RayError if the node or the
        actor is lost, MessageRefused or OSError."""
        self._actor = self._place(num_cpus)
        _log.info("trainer_placed", extra={"node": self._wait_for(self._actor.node.remote())})
        self._lay()
        failure = self._wait_for(self._actor.start.remote(self._order, base_id, module))
        if failure is None:
            self._has_begun = True
            for ref in self._actor.hear.options(num_returns="streaming").remote():
                self._note(ray.get(ref))
        else:
            self._connection.send(failure)
        status: int = ray.get(self._actor.close.remote())
        return status

    def _place(self, num_cpus: int) -> Any:
        """An actor, which begins when a node has room."""
        most = self._order.max_memory_bytes
        actor = ray.remote(TrainerActor).options(
            num_cpus=num_cpus,
            num_gpus=0 if self._order.device == "cpu" else 1,
            memory=None if most is None else max(1, most - MAPPED_BYTES),
        )
        return actor.remote()

    def _wait_for(self, ref: Any) -> Any:
        """What Ray answers. Raises RayError."""
        while not ray.wait([ref], timeout=REPORT_SECONDS)[0]:
            self._connection.send(Waiting())
        return ray.get(ref)

    def _obey(self) -> None:
        """Pass the orders to the trainer. Before it has begun, only Stop means anything."""
        try:
            while True:
                order = self._connection.receive()
                if self._has_begun:
                    self._actor.tell.remote(order)
                elif isinstance(order, Stop):
                    newest = newest_whole(self._checkpoints)
                    self._connection.send(Stopped(0 if newest is None else newest.step))
                    os._exit(0)
        except MessageRefused:
            _log.exception("trainer_message_not_understood")
            os._exit(1)

    def _lay(self) -> None:
        """Send the data, and the checkpoint from which training resumes."""
        names = WorkFolder(Path())
        self._send(Path(self._order.training_file), names.training_file)
        if self._order.validation_file is not None:
            self._send(Path(self._order.validation_file), names.validation_file)
        if newest := newest_whole(self._checkpoints):
            self._send(newest.path, names.checkpoints / newest.path.name)

    def _send(self, path: Path, name: Path) -> None:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                ray.get(self._actor.write.remote(str(name), chunk))

    def _note(self, message: FromTrainer) -> None:
        """Tell the server, which finds the files that the message names."""
        names = WorkFolder(Path())
        match message:
            case Checkpointed():
                message = self._fetch_checkpoint(message)
            case Finished():
                for name in (names.weights_file, names.config_file):
                    self._fetch(name, self._result / name.name)
                sync_directory(self._result)
        self._connection.send(message)

    def _fetch_checkpoint(self, message: Checkpointed) -> Checkpointed:
        """A checkpoint that the trainer has replaced meanwhile is left out: a newer one follows."""
        name = Path(message.file).name
        unfinished = self._checkpoints / ".incoming"
        try:
            self._fetch(WorkFolder(Path()).checkpoints / name, unfinished)
        except FileNotFoundError:
            unfinished.unlink(missing_ok=True)
            return message
        path = publish_checkpoint(unfinished, self._checkpoints, message.step).path
        if path.name != name:
            path.unlink()
            raise OSError(f"the checkpoint {name} came damaged")
        return Checkpointed(message.step, str(path), message.num_tokens)

    def _fetch(self, name: Path, path: Path) -> None:
        with path.open("wb") as file:
            for chunk in self._chunks(name):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def _chunks(self, name: Path) -> Iterator[bytes]:
        """Of a file of the node."""
        offset = 0
        while chunk := ray.get(self._actor.read.remote(str(name), offset)):
            yield chunk
            offset += len(chunk)


if __name__ == "__main__":
    main()
