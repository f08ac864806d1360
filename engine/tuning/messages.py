"""Messages between the server and the trainer process: length-prefixed JSON.

The server sends Open first. The trainer answers Ready or Failed, then reports as it trains. It ends
after Finished, Stopped or Failed. Pause, Proceed and Stop are obeyed between two steps. Waiting
comes before Ready, from a trainer on another machine.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...adapters.json_frames import decode, in_frame


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message of either side."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an adapter is trained. Each field is resolved: none means "auto"."""

    method: str
    """`supervised` or `dpo`."""
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Module names as in PEFT's `target_modules`. Empty: PEFT's `all-linear`."""
    is_rslora: bool
    is_dora: bool
    num_epochs: int
    batch_size: int
    """Sequences in a step."""
    learning_rate: float
    is_packed: bool
    """Several examples in one sequence, which do not attend to each other."""
    max_tokens: int
    """Tokens of a sequence. A longer example is cut at its start."""
    seed: int
    dpo_beta: float
    checkpoint_steps: int
    """Steps between two checkpoints."""


# --- to the trainer -----------------------------------------------------------------------------


class Open(Message, frozen=True):
    """The first message: what to train, from which files, and where the results go."""

    model: str
    """The folder of the base, as the engine loads it."""
    quantization: str
    """The engine's setting, so that training sees the values that are served."""
    device: str
    recipe: Recipe
    training_file: str
    """JSON lines: `{"messages": [...]}`, `{"prompt": ..., "completion": ...}`, or for `dpo`
    `{"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}`."""
    validation_file: str | None
    checkpoint_folder: str
    """Checkpoints are its files. Training resumes from the newest one that is whole."""
    result_folder: str
    """Receives `adapter_config.json` and `adapter_model.safetensors`."""
    max_memory_bytes: int | None
    """Address space that the process may take. None: no limit."""
    max_device_bytes: int | None = None
    """Memory of a CUDA device that the process may take. None: no limit."""
    cpus: tuple[int, ...] = ()
    """The CPUs on which the process runs. Empty: those of its parent."""
    dtype: str = "auto"
    """As the engine's settings of these names, which also decide the values that are served."""
    quantization_group_size: int | None = None
    quantization_exclude: tuple[str, ...] = ()
    embedding_quantization: str = "none"


class Pause(Message, frozen=True):
    """Do not begin another step. Answered by Paused."""


class Proceed(Message, frozen=True):
    """Go on after Pause."""


class Stop(Message, frozen=True):
    """Write a checkpoint and end. Answered by Stopped."""


ToTrainer: TypeAlias = Open | Pause | Proceed | Stop

# --- from the trainer ---------------------------------------------------------------------------


class Waiting(Message, frozen=True):
    """The trainer's machine is not ready yet: none has room, or it compares the base."""


class Ready(Message, frozen=True):
    """The base and the data are loaded."""

    first_step: int
    """0, or the step of the checkpoint from which training resumes."""
    num_steps: int
    num_examples: int
    num_trained_tokens: int
    """Tokens of all examples in all epochs."""
    num_tokens: int = 0
    """Tokens of the steps up to `first_step`."""
    step_bytes: int = 0
    """The most that a step may take beside the base; estimated."""


class Trained(Message, frozen=True):
    """One step is done."""

    step: int
    loss: float
    learning_rate: float
    num_tokens: int
    """Tokens of this step's sequences, padding not counted. `dpo`: of both outputs."""
    accuracy: float | None = None
    """Share of the completion's tokens that are the most probable ones. `dpo`: share of pairs whose
    preferred output has gained more probability than the other one."""


class Validated(Message, frozen=True):
    """The loss on the validation file after `step`."""

    step: int
    loss: float
    accuracy: float | None = None


class Checkpointed(Message, frozen=True):
    """A checkpoint is whole on the disk."""

    step: int
    file: str
    num_tokens: int
    """Tokens of the steps up to this one."""


class Paused(Message, frozen=True):
    """No step runs until Proceed."""


class Stopped(Message, frozen=True):
    """The process ends. Its last checkpoint is at `step`."""

    step: int


class Finished(Message, frozen=True):
    """The adapter is in the result folder. The process ends."""

    step: int
    num_tokens: int
    loss: float


class Failed(Message, frozen=True):
    """The process ends without an adapter."""

    code: str
    """`invalid_training_data`, `base_not_tunable`, `invalid_recipe`, `out_of_memory` or
    `training_failed`."""
    message: str
    line: int | None = None
    """The line of the training file that is wrong, from 1."""


FromTrainer: TypeAlias = (
    Waiting | Ready | Trained | Validated | Checkpointed | Paused | Stopped | Finished | Failed
)

_to_trainer: msgspec.json.Decoder[ToTrainer] = msgspec.json.Decoder(ToTrainer)
_from_trainer: msgspec.json.Decoder[FromTrainer] = msgspec.json.Decoder(FromTrainer)


def decode_to_trainer(content: bytes) -> ToTrainer:
    """A message for the trainer. Raises MessageRefused."""
    message: ToTrainer = decode(_to_trainer, content)
    return message


def decode_from_trainer(content: bytes) -> FromTrainer:
    """A message of the trainer. Raises MessageRefused."""
    message: FromTrainer = decode(_from_trainer, content)
    return message


encode = in_frame
