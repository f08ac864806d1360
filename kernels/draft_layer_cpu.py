"""A pass of an EAGLE head on the CPU in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu_library
from .attention import AttentionBatch, AttentionOptions
from .attention_cpu import are_served, layer_of, task_of
from .kv_pages import KvPages, PlainPages
from .linear import Linear
from .matrix_cpu import Matrix, is_matrix, matrix_of


class _Layer(ctypes.Structure):
    """DraftLayer of `cpu/draft_layer.h`."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down", "output_head")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "feature_norm")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "output_norm")),
        *((name, ctypes.c_int64) for name in ("size", "norms_before_residual")),
        ("eps", ctypes.c_float),
    )


class _Pass(ctypes.Structure):
    """DraftPass of `cpu/draft_layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embedded", "features", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("slots", "kept")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_kept")),
        *((name, ctypes.c_void_p) for name in ("states", "logits")),
    )


class DraftNorms(NamedTuple):
    """Weights `[hidden_size]` of RMS norms."""

    embedding: Tensor
    features: Tensor
    mlp: Tensor
    output: Tensor


class DraftLayerOnCpu:
    """The weights of a layer as the library reads them."""

    def __init__(
        self,
        linears: Sequence[Linear],
        norms: DraftNorms,
        *,
        num_heads: int,
        head_dim: int,
        eps: float,
        norms_before_residual: bool,
    ) -> None:
        """`linears`: of queries, keys and values; of attention's result; of gate and factor; of the
        MLP's result; the output head. Those that `serves_draft_layer`."""
        self._kept = linears, norms  # their memory is read
        self._heads = torch.empty(1, num_heads, head_dim, dtype=torch.float32)
        self._draft_vocab_size = linears[-1].out_features
        self._layer = _Layer(
            *map(matrix_of, linears),
            *(norm.data_ptr() for norm in norms),
            *(len(norms.output), norms_before_residual, eps),
        )

    def run(
        self,
        embedded: Tensor,
        features: Tensor,
        rotation: tuple[Tensor, Tensor],
        kept: Tensor,
        pages: tuple[KvPages, KvPages],
        batch: AttentionBatch,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor] | None:
        """Hidden states and logits of the rows `kept`, fp32; see `PackedHead.run`.

        None, without effect, for what the library does not serve: other pages, and long chunks.
        """
        function = cpu_library.function("draft_layer", embedded.dtype)
        are_plain = all(isinstance(each, PlainPages) for each in pages)
        if batch.chunks or len(batch.groups) != 1 or not are_plain:
            return None
        if not are_served(self._heads, *pages):
            return None
        assert function is not None
        parts = (embedded, features, *rotation, batch.slot_mapping, kept)
        dense = [part.contiguous() for part in parts]
        states = features.new_empty(len(kept), features.shape[-1])
        logits = features.new_empty(len(kept), self._draft_vocab_size)
        task = _Pass(
            *(part.data_ptr() for part in dense),
            *(len(embedded), len(kept), states.data_ptr(), logits.data_ptr()),
        )
        keys, values = pages
        function(
            ctypes.byref(self._layer),
            ctypes.byref(layer_of(self._heads, keys, values, options)),
            ctypes.byref(task_of(batch.groups[0])),
            ctypes.byref(task),
            *(keys.data.data_ptr(), values.data.data_ptr()),
        )
        return states, logits


def serves_draft_layer(linears: Sequence[Linear], norms: DraftNorms) -> bool:
    """Whether the library computes a layer of these."""
    return (
        all(norm.dtype is torch.float32 and not norm.is_cuda for norm in norms)
        and cpu_library.function("draft_layer", torch.float32) is not None
        and all(is_matrix(linear, torch.float32) for linear in linears)
    )
