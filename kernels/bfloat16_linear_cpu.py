"""Linear layers in bf16 on the CPU, multiplied by the library."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu_library
from .lane_packing import pack_lanes
from .linear import Linear, row_norms


class BFloat16PanelLinear(Linear):
    """The weight in panels of 16 outputs, multiplied in bf16; sums in fp32.

    Only for inputs in bf16, on a processor that multiplies pairs of them (AVX512_BF16). The bits of
    a row do not depend on the rows that are computed with it.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: bf16. Reads no more of it than slices of a few rows at a time."""
        super().__init__(weight.shape, None if bias is None else bias.float(), row_norms(weight))
        self.register_buffer("weight", pack_lanes(weight))
        self.weight_bytes = self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias, torch.bfloat16)

    def products(self, x: Tensor) -> Tensor:
        return self._multiply(x, None, torch.float32)

    def _multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`x [..., in]`, bf16, to `[..., out]` in dtype."""
        function = cpu_library.function("linear_half", dtype)
        assert function is not None
        assert x.shape[-1] == self.in_features
        assert x.dtype is torch.bfloat16
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features, dtype=dtype)
        function(
            *(x.data_ptr(), self.weight.data_ptr(), None if bias is None else bias.data_ptr()),
            *(y.data_ptr(), x.numel() // self.in_features, self.in_features, self.out_features),
            torch.get_num_threads(),
        )
        return y


def serves_bfloat16() -> bool:
    """Whether `BFloat16PanelLinear` is the fastest form in bf16; with AMX, oneDNN's is."""
    if cpu_library.function("linear_half", torch.bfloat16) is None:
        return False
    return not torch.cpu._is_amx_tile_supported()
