"""An adapter's tensors, each with its slice of the base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .arrangement import Arrangement
from .block import Extra
from .layout import Slice
from .safetensors_header import TensorEntry


class BoundMatrix(NamedTuple):
    """A tensor that is A or B of a slice, or a part of it."""

    tensor: TensorEntry
    arrangement: Arrangement
    scale: float = 1.0
    """Factor of the values at load: of B alpha ÷ rank, or alpha ÷ √rank; of A 1."""


@dataclass(frozen=True, slots=True)
class BoundSlice:
    """The tensors of one slice's A and B, as PEFT stores them."""

    index: int
    """Slice index in the layout."""
    layer: Slice
    a: tuple[BoundMatrix, ...]
    """One tensor; of experts that are not stacked in the file, the parts that make up A."""
    b: tuple[BoundMatrix, ...]
    rank: int
    """The rank of one expert, if there are several: the largest."""
    scale: float
    """Factor of B·A: alpha ÷ rank, or alpha ÷ √rank."""
    row_scales: tuple[tuple[int, float], ...] = ()
    """If experts differ: for each run of rows of the block's B their number and their factor."""
    is_parameter: bool = False
    """PEFT reaches it by `target_parameters`, not by `target_modules`."""

    @property
    def module(self) -> str:
        return self.layer.name

    @property
    def matrices(self) -> tuple[BoundMatrix, ...]:
        return self.a + self.b


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
        pairs = tuple(matrix.tensor for part in self.slices for matrix in part.matrices)
        return pairs + tuple(part.tensor for part in self.auxiliary if not part.is_derived)
