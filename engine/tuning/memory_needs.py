"""What the steps of a run take beside the loaded base: an estimate of the most, before the first.

A step keeps, for its backward pass, what each linear layer reads and writes, the scores of
attention, and the logits with their gradients. All is counted in float32, and each sequence as long
as the longest example.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..memory.host_memory import status_bytes
from .base import TunableBase
from .errors import InsufficientTrainingMemory

FLOAT_BYTES = 4
COPIES_OF_LINEARS = 2
"""Of what a linear layer reads and writes: the base's part and the adapter's."""
COPIES_OF_SCORES = 2
"""Before and after the softmax."""
COPIES_OF_LOGITS = 6
"""Logits, their shifted copy and their logarithms, and the gradients of each."""
COPIES_OF_PARAMETERS = 5
"""Beside the parameters: gradients, both moments of AdamW, and what a checkpoint and an update hold
for a moment."""
MIB = 1 << 20
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Shapes:
    """What decides the memory of a step."""

    linear_features: int
    """Inputs and outputs of all linear layers of the decoder, added up."""
    vocab_size: int
    num_scores: int
    """Heads of all layers: each has a score for each pair of tokens of a sequence."""
    num_parameters: int
    """Trained ones."""

    def bytes(self, *, num_rows: int, width: int) -> int:
        """The most that a step of these sequences takes. `width`: tokens of each."""
        per_token = (
            COPIES_OF_LINEARS * self.linear_features
            + COPIES_OF_LOGITS * self.vocab_size
            + COPIES_OF_SCORES * self.num_scores * width
        )
        activations = num_rows * width * per_token
        return FLOAT_BYTES * (activations + COPIES_OF_PARAMETERS * self.num_parameters)


def shapes_of(base: TunableBase, parameters: Iterable[Tensor]) -> Shapes:
    """Of this base and what is trained of it."""
    config: Any = base.model.config.get_text_config()
    modules = dict(base.model.named_modules())
    linears = [module for path, module in modules.items() if path in base.linears]
    return Shapes(
        linear_features=sum(map(_features, linears)),
        vocab_size=config.vocab_size,
        num_scores=getattr(config, "num_attention_heads", 0) * config.num_hidden_layers,
        num_parameters=sum(each.numel() for each in parameters),
    )


def _features(linear: Any) -> int:
    """Inputs and outputs. Some types have them as the shape of the weight alone."""
    if hasattr(linear, "in_features"):
        return int(linear.in_features + linear.out_features)
    return sum(linear.weight.shape)


def check_fits(needed_bytes: int, max_memory_bytes: int | None) -> None:
    """Raises InsufficientTrainingMemory if this does not fit beside what the process has now.

    max_memory_bytes: address space that the process may take; None: no limit.
    """
    if max_memory_bytes is None or not _STATUS.exists():  # not Linux: the limit has to do
        return
    left = max_memory_bytes - status_bytes(_STATUS, "VmSize")
    if needed_bytes > left:
        raise InsufficientTrainingMemory(
            f"a step may need {needed_bytes // MIB} MiB, and {max(0, left) // MIB} MiB are left; "
            "use a smaller `batch_size`, `lora.max_tokens` or `lora.rank`"
        )
