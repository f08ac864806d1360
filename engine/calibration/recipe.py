"""How a checkpoint is quantized."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...kernels.quantized_weight import CodeType
from .grid import GRIDS, Grid


class Method(StrEnum):
    """How codes are chosen."""

    GPTQ = "gptq"
    """With the least error of each layer's outputs (`gptq.py`)."""
    AWQ = "awq"
    """The nearest ones, after inputs that matter more were scaled up (`awq.py`)."""
    RTN = "rtn"
    """The nearest ones."""


class CodeFormat(StrEnum):
    """What codes are."""

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"
    """e4m3, a scale per output."""


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
    """Patterns of linear layers that stay as they are."""
    num_samples: int = 128
    sequence_length: int = 512
    """Tokens of a sample."""

    @property
    def grid(self) -> Grid:
        return GRIDS[CodeType(self.code_format.value)]

    def group(self, in_features: int) -> int:
        """Inputs of a linear layer that share a scale."""
        is_by_output = self.code_format is CodeFormat.FP8 or self.group_size == 0
        return in_features if is_by_output else self.group_size
