"""The last positions that a query sees. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Positions = TypeVar("Positions", int, "NDArray[np.int64]", "Tensor")


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """A window that slides with the query, or the query's chunk.

    The query at position 9 sees the positions 6 to 9 with a window of 4, and 8 and 9 with chunks
    of 4.
    """

    size: int
    """The positions that a query sees at most, including its own."""
    is_chunked: bool = False
    """Whether a query sees only its chunk: those from the last multiple of `size` on."""

    def first_visible(self, positions: Positions) -> Positions:
        """The first position that the queries at these positions see; negative: all."""
        if self.is_chunked:
            return positions // self.size * self.size
        return positions - self.size + 1

    def __str__(self) -> str:
        return f"chunks of {self.size}" if self.is_chunked else str(self.size)
