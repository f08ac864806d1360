"""An adapter's tensors, each with its slice of the base."""

from __future__ import annotations

from dataclasses import dataclass

from .block import Extra
from .layout import Slice
from .safetensors_header import TensorEntry


@dataclass(frozen=True, slots=True)
class BoundSlice:
    """The two matrices of one slice, as PEFT stores them."""

    index: int
    """Slice index in the layout."""
    layer: Slice
    a: TensorEntry
    """`[rank, in]`; of an embedding `[rank, vocabulary]`, of experts `[experts · rank, in]`, of
    turned ones `[experts · rank, out]`."""
    b: TensorEntry
    """`[out, rank]`; of experts `[out, rank · experts]`, of turned ones `[in, rank · experts]`."""
    rank: int
    """The rank of one expert, if there are several."""
    scale: float
    """Factor of B·A: alpha ÷ rank, or alpha ÷ √rank."""
    is_parameter: bool = False
    """PEFT reaches it by `target_parameters`, not by `target_modules`."""

    @property
    def module(self) -> str:
        return self.layer.name

    @property
    def in_order(self) -> tuple[TensorEntry, TensorEntry]:
        """The two in the order in which inputs are multiplied with them."""
        return (self.b, self.a) if self.layer.is_turned else (self.a, self.b)


@dataclass(frozen=True, slots=True)
class BoundExtra:
    """An auxiliary tensor of a slice."""

    extra: Extra
    layer: Slice
    tensor: TensorEntry
    rows: tuple[int, ...] = ()
    """Which row of the tensor each row of the extra is; empty where they agree."""
    scale: float = 1.0
    """Factor at load."""
    is_derived: bool = False
    """The tensor also belongs to another auxiliary tensor, so the block holds it twice."""


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A matrix that is left out if it is the base's own."""

    module: str
    tensor: TensorEntry


@dataclass(frozen=True, slots=True)
class TwinTensor:
    """A tensor that PEFT saved twice, of which one is left out if both are equal."""

    kept: TensorEntry
    left_out: TensorEntry


@dataclass(frozen=True, slots=True)
class Binding:
    """Every tensor of an adapter, in the layout's order."""

    slices: tuple[BoundSlice, ...]
    auxiliary: tuple[BoundExtra, ...] = ()
    copies: tuple[BaseCopy, ...] = ()
    twins: tuple[TwinTensor, ...] = ()
    added_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What `trainable_token_indices` would be with the rows of resized ends; empty: as it is."""
    vocab_size: int | None = None
    """The rows of the adapter's embedding and head, if it is not the base's number."""

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """The adapter's tensors, each once."""
        pairs = tuple(tensor for part in self.slices for tensor in (part.a, part.b))
        return pairs + tuple(part.tensor for part in self.auxiliary if not part.is_derived)
