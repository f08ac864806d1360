"""LoRA on the CPU: the library reads matrices in the arena."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import cpu_library
from .lora_weights import AdapterWeights

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Projection(ctypes.Structure):
    """LoraProjection of `cpu/lora.h`."""

    _fields_ = (
        *((name, _POINTER) for name in ("table", "slice_outs")),
        *((name, _NUMBER) for name in ("num_table_slices", "first_slice", "num_slices")),
        ("in_features", _NUMBER),
    )


class CpuLora:
    """Adds the deltas of one projection in one call."""

    def __init__(self, first_slice: int, in_features: int, slice_outs: tuple[int, ...]) -> None:
        """As in `lora.LoraProjection`."""
        self._first_slice = first_slice
        self._in_features = in_features
        self._slice_outs = (ctypes.c_int64 * len(slice_outs))(*slice_outs)
        self._described: _Projection | None = None

    def add(
        self, x: Tensor, y: Tensor, weights: AdapterWeights, token_rows: Tensor, max_rank: int
    ) -> None:
        """Add each token's delta to y; see `lora_reference`.

        x `[num_tokens, in_features]`, y `[num_tokens, sum of outs]`, token_rows int32
        `[num_tokens]`, whose adapters' slices have at most max_rank. The dtype is one that
        `is_served`.
        """
        function = cpu_library.function("add_lora", x.dtype)
        assert function is not None
        num_tokens, max_ranks = x.shape[0], max_rank * len(self._slice_outs)
        hidden = torch.empty(num_tokens, max_ranks, dtype=torch.float32)
        function(
            *(self.described(weights), weights.flat.data_ptr()),
            *(x.data_ptr(), y.data_ptr(), token_rows.data_ptr(), hidden.data_ptr()),
            *(num_tokens, max_ranks, x.stride(0), y.stride(0), torch.get_num_threads()),
        )

    def described(self, weights: AdapterWeights) -> int:
        """The address of the library's LoraProjection, valid until other weights are described."""
        table = weights.table
        if self._described is None or self._described.table != table.data_ptr():
            self._described = _Projection(
                *(table.data_ptr(), ctypes.addressof(self._slice_outs)),
                *(table.shape[1], self._first_slice, len(self._slice_outs), self._in_features),
            )
        return ctypes.addressof(self._described)


def is_served(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `CpuLora` serves weights of this dtype and device."""
    return device.type == "cpu" and cpu_library.function("add_lora", dtype) is not None
