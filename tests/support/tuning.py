"""Trainer processes, and data from which a small base learns something that is easy to see."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.json_frames import Inbox
from loraplex.engine.tuning.environment import trainer_environment
from loraplex.engine.tuning.messages import (
    Failed,
    Finished,
    FromTrainer,
    Open,
    Recipe,
    Stopped,
    ToTrainer,
    Trained,
    decode_from_trainer,
    encode,
)
from loraplex.engine.tuning.run import run

END = (Finished, Failed, Stopped)
RECIPE = Recipe(
    method="supervised",
    rank=4,
    alpha=8.0,
    targets=(),
    is_rslora=False,
    is_dora=False,
    num_epochs=1,
    batch_size=4,
    learning_rate=1e-2,
    is_packed=False,
    max_tokens=128,
    seed=3,
    dpo_beta=0.1,
    checkpoint_steps=5,
)


def recipe(**changes: Any) -> Recipe:
    """The usual recipe of tests with these changes."""
    return msgspec.structs.replace(RECIPE, **changes)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chat_line(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def open_order(model: Path, data: Path, work: Path, **changes: Any) -> Open:
    """What to train, with the folders of checkpoints and results in `work`."""
    folders = [work / "checkpoints", work / "result"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    order = Open(
        model=str(model),
        quantization="none",
        device="cpu",
        recipe=RECIPE,
        training_file=str(data),
        validation_file=None,
        checkpoint_folder=str(folders[0]),
        result_folder=str(folders[1]),
        max_memory_bytes=None,
        dtype="float32",
    )
    return msgspec.structs.replace(order, **changes)


class TrainerProcess:
    """A trainer as a server starts it."""

    def __init__(
        self,
        order: Open,
        module: str = "support.quick_trainer",
        num_threads: int | None = 1,
    ) -> None:
        """num_threads: None: as many as torch chooses."""
        threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=theirs.fileno(),
                stdout=2,
                env=trainer_environment({**os.environ, **threads}),
                start_new_session=True,
            )
        self._socket = ours
        ours.settimeout(280)
        self._inbox = Inbox()
        self._arrived: list[FromTrainer] = []
        self.send(order)

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def send(self, message: ToTrainer) -> None:
        self._socket.sendall(encode(message))

    def receive(self) -> FromTrainer:
        while not self._arrived:
            data = self._socket.recv(1 << 16)
            assert data, f"the trainer ended with {self.process.wait()}"
            self._arrived += map(decode_from_trainer, self._inbox.take(data))
        return self._arrived.pop(0)

    def receive_until(self, *kinds: type[FromTrainer]) -> list[FromTrainer]:
        """Everything up to the first of these messages, that one included."""
        received = [self.receive()]
        while not isinstance(received[-1], (*kinds, *END)):
            received.append(self.receive())
        return received


def train(order: Open) -> list[FromTrainer]:
    """All reports of a trainer that runs to its end."""
    with TrainerProcess(order) as trainer:
        reports = trainer.receive_until()
        trainer.process.wait(30)
    return reports


def of_kind(reports: Sequence[FromTrainer], kind: type[Any]) -> list[Any]:
    return [report for report in reports if isinstance(report, kind)]


class _Script:
    """A server without a process: gives its orders at the steps that it was told."""

    def __init__(self, orders: Mapping[int, Sequence[ToTrainer]]) -> None:
        self._orders = {step: list(each) for step, each in orders.items()}
        self._step = 0
        self.reports: list[FromTrainer] = []

    def send(self, message: FromTrainer) -> None:
        # As the socket carries it.
        self.reports.append(decode_from_trainer(encode(message)[4:]))
        if isinstance(message, Trained):
            self._step = message.step

    def receive(self) -> ToTrainer:
        return self._orders[self._step].pop(0)

    def poll(self) -> ToTrainer | None:
        waiting = self._orders.get(self._step)
        return waiting.pop(0) if waiting else None


def train_here(
    order: Open, orders: Mapping[int, Sequence[ToTrainer]] | None = None
) -> list[FromTrainer]:
    """The reports of a run in this process, without confinement. `orders`: by the number of steps
    that are done."""
    script = _Script(orders or {})
    run(order, script)  # type: ignore[arg-type]
    return script.reports
