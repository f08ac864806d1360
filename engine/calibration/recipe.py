"""How a checkpoint is quantized."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.quantized_weight import CodeType
from .grid import GRIDS, Grid
from .method import CodeFormat, Method


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options that change a checkpoint's values."""

    method: Method = Method.GPTQ
    code_format: CodeFormat = CodeFormat.INT4
    group_size: int = 128
    """Inputs that share a scale; 0: all of them. fp8 always has a scale per output."""
    act_order: bool = True
    """GPTQ alone: round the inputs with the largest activations first."""
    exclude: tuple[str, ...] = ()
    """Patterns of linear layers and experts that stay as they are."""
    num_samples: int = 128
    sequence_length: int = 512
    """Tokens of a sample."""

    @property
    def grid(self) -> Grid:
        return GRIDS[CodeType(self.code_format.value)]

    def group(self, in_features: int) -> int:
        """Inputs of a matrix that share a scale."""
        is_by_output = self.code_format is CodeFormat.FP8 or self.group_size == 0
        return in_features if is_by_output else self.group_size
