"""A trainer process without a model: `python -m support.fake_trainer`, on a socket as its input.

It speaks the real messages, writes checkpoints and goes on from them, and its result is a valid
adapter that depends on the seed. A step is an example of the training file; its tokens are the
bytes of the last message. The first message of the first example may hold words for it:
`slow` (0.1 s for a step), `die-N` (it kills itself after the third step of its first N lives),
`wrong` (the data is refused at line 2), `none` (an adapter for another base).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from loraplex.adapters.json_frames import Inbox
from loraplex.engine.tuning.checkpoint_files import newest_whole, publish_checkpoint
from loraplex.engine.tuning.messages import (
    Checkpointed,
    Failed,
    Finished,
    FromTrainer,
    Open,
    Pause,
    Paused,
    Proceed,
    Ready,
    Stop,
    Stopped,
    ToTrainer,
    Trained,
    Validated,
    decode_to_trainer,
    encode,
)

CHECKPOINT_STEPS = 4
SLOW_SECONDS = 0.1
DEADLY_STEP = 3
"""Of each life that ends by itself."""
_PR_SET_PDEATHSIG = 1


class State(msgspec.Struct):
    """The contents of a checkpoint."""

    step: int
    num_tokens: int


class Server:
    """The other end of the socket."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=0)
        self._inbox = Inbox()
        self._received: list[ToTrainer] = []

    def tell(self, message: FromTrainer) -> None:
        self._socket.sendall(encode(message))

    def hear(self, *, waits: bool) -> ToTrainer | None:
        """The next message; None: there is none yet. It ends the process if the server is gone."""
        while not self._received:
            if not waits and not select.select([self._socket], [], [], 0)[0]:
                return None
            data = self._socket.recv(1 << 16)
            if not data:
                os._exit(1)
            self._received += map(decode_to_trainer, self._inbox.take(data))
        return self._received.pop(0)


class Training:
    """One life of the trainer of a job."""

    def __init__(self, server: Server, opened: Open) -> None:
        self._server = server
        self._opened = opened
        self._checkpoints = Path(opened.checkpoint_folder)
        self._examples = [
            json.loads(line) for line in Path(opened.training_file).read_text().splitlines()
        ]
        self._words = self._examples[0]["messages"][0]["content"].split()
        self._num_steps = len(self._examples) * opened.recipe.num_epochs
        self._state = self._last_checkpoint()
        self._life = self._count_life()

    def run(self) -> None:
        if "wrong" in self._words:
            message = "`messages` is missing"
            self._server.tell(Failed("invalid_training_data", message, line=2))
            return
        self._server.tell(self._ready())
        while self._state.step < self._num_steps:
            if not self._may_go_on():
                return
            self._take_step()
        if self._opened.validation_file:
            self._server.tell(Validated(self._state.step, 0.5, 0.75))
        self._write_result()
        self._server.tell(Finished(self._state.step, self._state.num_tokens, 0.25))

    def _ready(self) -> Ready:
        num_tokens = sum(map(num_tokens_of, self._examples)) * self._opened.recipe.num_epochs
        return Ready(
            self._state.step,
            self._num_steps,
            len(self._examples),
            num_tokens,
            self._state.num_tokens,
        )

    def _may_go_on(self) -> bool:
        message = self._server.hear(waits=False)
        while message is not None:
            if isinstance(message, Stop):
                self._write_checkpoint()
                self._server.tell(Stopped(self._state.step))
                return False
            if isinstance(message, Pause):
                self._server.tell(Paused())
            message = self._server.hear(waits=not isinstance(message, Proceed))
        return True

    def _take_step(self) -> None:
        if "slow" in self._words:
            time.sleep(SLOW_SECONDS)
        example = self._examples[self._state.step % len(self._examples)]
        self._state.step += 1
        self._state.num_tokens += num_tokens_of(example)
        loss = 1 / self._state.step
        self._server.tell(Trained(self._state.step, loss, 1e-4, num_tokens_of(example), 0.5))
        if self._is_deadly():
            os.kill(os.getpid(), signal.SIGKILL)
        if self._state.step % CHECKPOINT_STEPS == 0:
            self._write_checkpoint()

    def _is_deadly(self) -> bool:
        num_lives = next((int(word[4:]) for word in self._words if word.startswith("die-")), 0)
        first = self._state.step - 1
        return self._life <= num_lives and (first - self._first_step) % DEADLY_STEP == 2

    def _count_life(self) -> int:
        lives = self._checkpoints.parent / "lives"
        with lives.open("a") as file:
            file.write("x")
        self._first_step = self._state.step
        return len(lives.read_text())

    def _last_checkpoint(self) -> State:
        newest = newest_whole(self._checkpoints)
        return State(0, 0) if newest is None else read_state(newest.path)

    def _write_checkpoint(self) -> None:
        step, num_tokens = self._state.step, self._state.num_tokens
        path = write_state(self._checkpoints, self._state)
        self._server.tell(Checkpointed(step, str(path), num_tokens))

    def _write_result(self) -> None:
        """An adapter in PEFT's layout for the query projections of a Llama."""
        base: dict[str, Any] = json.loads((Path(self._opened.model) / "config.json").read_bytes())
        hidden, recipe = base["hidden_size"], self._opened.recipe
        random = np.random.default_rng(recipe.seed)
        width = hidden + 8 if "none" in self._words else hidden
        tensors = {}
        for layer in range(base["num_hidden_layers"]):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            for part, shape in (("A", (recipe.rank, width)), ("B", (width, recipe.rank))):
                drawn = random.standard_normal(shape) * 0.1
                tensors[f"{name}.lora_{part}.weight"] = drawn.astype(np.float32)
        result = Path(self._opened.result_folder)
        save_file(tensors, result / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": recipe.rank,
            "lora_alpha": recipe.alpha,
            "target_modules": ["q_proj"],
        }
        (result / "adapter_config.json").write_text(json.dumps(config))


def write_state(folder: Path, state: State) -> Path:
    """A checkpoint without tensors."""
    unfinished = folder / ".unfinished"
    save_file({}, unfinished, metadata={"state": msgspec.json.encode(state).decode()})
    return publish_checkpoint(unfinished, folder, state.step).path


def read_state(path: Path) -> State:
    with safe_open(path, framework="np") as file:
        return msgspec.json.decode(file.metadata()["state"], type=State)


def num_tokens_of(example: dict[str, Any]) -> int:
    return len(example["messages"][-1]["content"])


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    server = Server()
    opened = server.hear(waits=True)
    assert isinstance(opened, Open), opened
    Training(server, opened).run()


if __name__ == "__main__":
    main()
