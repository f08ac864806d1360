"""Memory that the loaded models need on the device. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .kv_budget import KvDemand


@dataclass(frozen=True, slots=True)
class BaseDemand:
    """Memory that the base needs."""

    weight_bytes: int
    """Weights, already loaded."""
    activation_bytes: int
    """Activations of a full step."""
    kv: tuple[KvDemand, ...]
    """By KV group."""
    graph_bytes: int = 0
    """Captured decode steps, those of a draft model included."""
    weight_format: str = "none"
    """How the weights are quantized."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in every KV group."""
        return sum(demand.bytes_per_block for demand in self.kv)

    @property
    def max_model_len(self) -> int:
        return self.kv[0].max_model_len


class EagleDemand(NamedTuple):
    """Memory that an EAGLE head or a multi-token head needs."""

    weight_bytes: int
    """Weights, already loaded."""
    block_bytes: int
    """One block of its KV cache."""
    reading_bytes: int
    """The hidden states that it reads: of a full step, and those that it keeps. Also the slots
    for heads of adapters, and the graphs of all passes."""
    name: str = "eagle"
    """That of its proposer."""


class ProposerDemand(NamedTuple):
    """Memory that proposers need; zeros without them."""

    model_bytes: int = 0
    """Weights of the draft model, already loaded."""
    kv_block_bytes: int = 0
    """One block of the draft model's KV cache. It gets as many blocks as a base without attention
    windows would."""
    head_bytes: int = 0
    """Medusa heads, already loaded."""
    rounded_bytes: int = 0
    """The base's linear layers and output head once more, in fewer bits, already loaded."""
    eagle_bytes: int = 0
    """An EAGLE head or a multi-token head, already loaded."""
    eagle_block_bytes: int = 0
    """One block of its KV cache. It gets as many blocks as a draft model."""
    eagle_name: str = "eagle"
    """See `EagleDemand.name`."""

    @property
    def loaded_bytes(self) -> int:
        return self.model_bytes + self.head_bytes + self.rounded_bytes + self.eagle_bytes

    @property
    def block_bytes(self) -> int:
        """One block of every KV cache."""
        return self.kv_block_bytes + self.eagle_block_bytes
