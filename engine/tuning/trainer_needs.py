"""What one trainer takes beside the engine, before a job is there: an estimate. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...adapters.layout import Slice, SliceKind
from .methods import Method
from .step_shapes import FLOAT_BYTES, Shapes

PROCESS_BYTES = 512 << 20
"""Python, torch, transformers and PEFT in a process of their own. 478 MiB measured on Linux."""


@dataclass(frozen=True, slots=True)
class RecipeLimits:
    """What decides the memory of a recipe's steps at most."""

    rank: int
    batch_size: int
    max_tokens: int
    method: Method = Method.SUPERVISED

    @property
    def num_sequences(self) -> int:
        """Of a step."""
        return self.batch_size * self.method.num_ends


@dataclass(frozen=True, slots=True)
class TrainerNeeds:
    """Bytes by purpose."""

    base_bytes: int
    """The trainer's own copy of the base, with one layer's weight in float32 while it is used."""
    step_bytes: int
    """Activations, gradients and moments of a step of the longest sequences."""

    @property
    def loaded_bytes(self) -> int:
        """Before the first step."""
        return PROCESS_BYTES + self.base_bytes

    @property
    def total_bytes(self) -> int:
        return self.loaded_bytes + self.step_bytes


def trainer_needs(
    slices: Iterable[Slice],
    limits: RecipeLimits,
    *,
    weight_bytes: int,
    vocab_size: int,
    num_query_heads: int,
) -> TrainerNeeds:
    """For LoRA on all linear layers of the decoder.

    slices: of the whole base; weight_bytes: of the whole base as it is served; num_query_heads: of
    all layers, added up.
    """
    linears = [each for each in slices if each.kind is SliceKind.LINEAR]
    features = sum(each.in_features + each.out_features for each in linears)
    largest = max((each.in_features * each.out_features for each in linears), default=0)
    shapes = Shapes(
        linear_features=features,
        vocab_size=vocab_size,
        num_scores=num_query_heads,
        num_parameters=limits.rank * features,
    )
    return TrainerNeeds(
        base_bytes=weight_bytes + FLOAT_BYTES * largest,
        step_bytes=shapes.bytes(num_rows=limits.num_sequences, width=limits.max_tokens),
    )
