"""int8 linear layers on the CPU (W8A8), multiplied by the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cpu_library
from .int8_linear import Int8Linear
from .lane_packing import pack_lanes
from .linear import row_norms
from .quantized_weight import QuantizedWeight

_PANEL = 16
"""PANEL of `cpu/linear.h`."""
_RAISED = 128
"""RAISED of `cpu/int8_linear.h`."""


class Int8PanelLinear(Int8Linear):
    """The weight in panels of 16 outputs, of codes that are raised to unsigned bytes.

    Only on a processor that multiplies them (AVX512_VNNI). The bits of a row do not depend on the
    rows that are computed with it.
    """

    weight: Tensor
    weight_scale: Tensor
    """fp32 `[outputs of the panels]`."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        """weight: one that `serves_int8`."""
        scale = weight.scale.float().flatten()
        norms = row_norms(weight.codes) * scale
        super().__init__(weight.shape, None if bias is None else bias.float(), norms)
        self.register_buffer(
            "weight", pack_lanes(weight.codes).view(torch.uint8).bitwise_xor_(_RAISED)
        )
        self.register_buffer("weight_scale", F.pad(scale, (0, -len(scale) % _PANEL)))
        self.weight_bytes = self.weight.nbytes + self.weight_scale.nbytes

    def forward(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        return self._computed(x, largest, self.bias)

    def _multiply(self, x: Tensor) -> Tensor:
        return self._computed(x, None, None)

    def _computed(self, x: Tensor, largest: Tensor | None, bias: Tensor | None) -> Tensor:
        """`x [..., in]`, fp32 or bf16, to `[..., out]` in the same dtype."""
        function = cpu_library.function("int8_linear", x.dtype)
        if function is None:
            assert x.dtype is not torch.float32, "the library is missing"
            return self._computed(x.float(), largest, bias).to(x.dtype)
        assert x.shape[-1] == self.in_features
        x = x.contiguous()
        num_rows = x.numel() // self.in_features
        if largest is not None:
            largest = largest.float().contiguous()
            assert largest.numel() == num_rows
        y = x.new_empty(*x.shape[:-1], self.out_features)
        function(
            *(x.data_ptr(), _address(largest), self.weight.data_ptr()),
            *(self.weight_scale.data_ptr(), _address(bias), y.data_ptr()),
            *(num_rows, self.in_features, self.out_features, torch.get_num_threads()),
        )
        return y


def serves_int8_panels() -> bool:
    """Whether `Int8PanelLinear` is the fastest form of int8; with AMX, oneDNN's is."""
    if cpu_library.function("int8_linear", torch.float32) is None:
        return False
    return not torch.cpu._is_amx_tile_supported()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
