"""A decoder layer on the CPU, in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu_library
from .attention import AttentionBatch, AttentionOptions
from .attention_cpu import are_served, layer_of, task_of
from .gated_activation import Activation
from .kv_pages import KvPages, PlainPages
from .linear import Linear
from .lora_batch import LoraBatch
from .lora_weights import AdapterWeights
from .matrix_cpu import Matrix, is_matrix, matrix_of
from .rms_norm import NormForm

_NUM_LINEARS = 4


class LayerWork(IntEnum):
    """LayerWork of `cpu/decoder_layer.h`: the kinds of work in a layer."""

    PRODUCTS = 0
    LORA = 1
    ATTENTION = 2
    OTHERS = 3


class _Norm(ctypes.Structure):
    """RmsNorm of `cpu/decoder_layer.h`."""

    _fields_ = (("weight", ctypes.c_void_p), ("form", ctypes.c_int64), ("eps", ctypes.c_float))


class _Layer(ctypes.Structure):
    """DecoderLayer of `cpu/decoder_layer.h`."""

    _fields_ = (
        ("linears", Matrix * _NUM_LINEARS),
        *((name, _Norm) for name in ("input_norm", "query_norm", "key_norm")),
        *((name, _Norm) for name in ("o_norm", "mlp_norm", "down_norm")),
        *((name, ctypes.c_int64) for name in ("size", "activation")),
    )


class _Rows(ctypes.Structure):
    """DecoderRows of `cpu/decoder_layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "kept", "groups")),
        *((name, ctypes.c_int64) for name in ("num_groups", "num_rows", "num_kept")),
        ("num_threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("adapter_rows", "adapters")),
        ("max_rank", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
    )


class LayerNorm(NamedTuple):
    """An RMS norm of a layer; see `rms_norm`."""

    weight: Tensor
    eps: float
    form: NormForm


@dataclass(frozen=True, slots=True)
class DecoderLayerParts:
    """A decoder layer as the library computes it, with the residual added to what attention and the
    MLP give."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: LayerNorm
    query_norm: LayerNorm | None
    """Of each head, before it is rotated."""
    key_norm: LayerNorm | None
    o_norm: LayerNorm | None
    """Of the result of `o`."""
    mlp_norm: LayerNorm
    down_norm: LayerNorm | None
    """Of the result of `down`."""
    activation: Activation
    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        return self.input_norm.weight.dtype

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In the order of their products."""
        return self.qkv, self.o, self.gate_up, self.down

    def fit(self) -> bool:
        """Whether the sizes are those of such a layer."""
        size, inner = self.qkv.in_features, self.down.in_features
        num_heads = self.num_heads + 2 * self.num_kv_heads
        return (
            self.qkv.out_features == num_heads * self.head_dim
            and self.o.in_features == self.num_heads * self.head_dim
            and self.o.out_features == self.down.out_features == self.gate_up.in_features == size
            and self.gate_up.out_features == 2 * inner
            and all(_has_size(norm, size) for norm in (self.input_norm, self.o_norm))
            and all(_has_size(norm, size) for norm in (self.mlp_norm, self.down_norm))
            and all(_has_size(norm, self.head_dim) for norm in (self.query_norm, self.key_norm))
        )

    def fit_rows(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> bool:
        """Whether rows and their rotation have the dtype, and heads are rotated whole."""
        return all(part.dtype is self.dtype for part in (x, *rotation)) and all(
            part.shape[-1] == self.head_dim for part in rotation
        )

    @property
    def norms(self) -> tuple[LayerNorm | None, ...]:
        """In the order in which they are computed."""
        heads = self.query_norm, self.key_norm
        return self.input_norm, *heads, self.o_norm, self.mlp_norm, self.down_norm


def _has_size(norm: LayerNorm | None, size: int) -> bool:
    return norm is None or len(norm.weight) == size


class StepRows:
    """What all layers of a KV group read of a step's rows."""

    def __init__(
        self,
        rotation: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        lora: LoraBatch | None,
        weights: AdapterWeights | None,
        kept: Tensor | None = None,
        seconds: ctypes.Array[ctypes.c_double] | None = None,
    ) -> None:
        """`rotation`: cosines and sines `[1, num_rows, dim]` in the dtype of the rows. `lora` and
        `weights`: None if no adapter acts on a row. `kept`: int64, ascending: the rows of the last
        layer's result that are read; None: all. `seconds`: to which the time of each LayerWork is
        added."""
        cos, sin = (part.contiguous() for part in rotation)  # of one sequence: rows
        attended = (*batch.groups, batch.chunk_group()) if batch.chunks else batch.groups
        groups = [task_of(group) for group in attended]
        kept = None if kept is None else kept.contiguous()
        array = (type(groups[0]) * len(groups))(*groups)
        self._held = cos, sin, batch, kept, array, lora, seconds  # their memory is read
        self.rotation = rotation
        self.has_unread = kept is not None
        self.fields = _Rows(
            *(cos.data_ptr(), sin.data_ptr(), batch.slot_mapping.data_ptr()),
            *(None if kept is None else kept.data_ptr(), ctypes.addressof(array)),
            *(len(groups), len(batch.slot_mapping), 0 if kept is None else len(kept)),
            torch.get_num_threads(),
            None if lora is None else lora.token_rows.data_ptr(),
            None if weights is None else weights.flat.data_ptr(),
            0 if lora is None else lora.max_rank,
            None if seconds is None else ctypes.addressof(seconds),
        )


class DecoderLayerOnCpu:
    """A layer's weights as the library reads them."""

    def __init__(self, parts: DecoderLayerParts) -> None:
        """`parts`: those that `serves_decoder_layer`."""
        self._parts = parts  # their memory is read
        function = cpu_library.function("decoder_layer", parts.dtype)
        assert function is not None
        self._function = function
        self._heads = torch.empty(1, parts.num_heads, parts.head_dim, dtype=parts.dtype)
        sinks = parts.options.sinks
        self._sinks = None if sinks is None else sinks.float().contiguous()
        self._layer = _Layer(
            (Matrix * _NUM_LINEARS)(*map(matrix_of, parts.linears)),
            *map(_norm, parts.norms),
            *(parts.qkv.in_features, parts.activation.value),
        )

    def run(
        self,
        x: Tensor,
        rows: StepRows,
        pages: tuple[KvPages, KvPages],
        options: AttentionOptions,
        loras: Sequence[int] | None,
        *,
        is_last: bool = False,
    ) -> Tensor | None:
        """The layer's result for `x [num_rows, size]`; writes keys and values.

        `options`: those of the parts, with the window of the pages. `loras`: what
        `LoraProjection.described` gives of each linear layer, if adapters act on rows. `is_last`:
        rows of the result that are not read are zeros. None, without effect, for what the library
        does not serve: other pages.
        """
        keys, values = pages
        if not (isinstance(keys, PlainPages) and isinstance(values, PlainPages)):
            return None
        if not are_served(self._heads, keys, values) or keys.dim != values.dim:
            return None
        x = x.contiguous()
        has_unread = is_last and rows.has_unread
        out = torch.zeros_like(x) if has_unread else torch.empty_like(x)
        attention = layer_of(self._heads, keys, values, options, self._sinks)
        self._function(
            *(ctypes.addressof(self._layer), ctypes.byref(attention)),
            *(ctypes.addressof(rows.fields), x.data_ptr(), out.data_ptr()),
            *(keys.data.data_ptr(), values.data.data_ptr()),
            None if loras is None else (ctypes.c_void_p * _NUM_LINEARS)(*loras),
            has_unread,
        )
        return out


def serves_decoder_layer(parts: DecoderLayerParts) -> bool:
    """Whether the library computes a layer of these parts."""
    dtype = parts.dtype
    norms = [norm.weight for norm in parts.norms if norm is not None]
    return (
        cpu_library.function("decoder_layer", dtype) is not None
        and parts.fit()
        and all(weight.dtype is dtype and not weight.is_cuda for weight in norms)
        and all(is_matrix(linear, dtype) for linear in parts.linears)
    )


def serves_chunks(dtype: torch.dtype) -> bool:
    """Whether steps with prompt chunks are one call too: where `paged_attention` attends them in
    place."""
    return cpu_library.function("attend_prompts", dtype) is not None


def _norm(norm: LayerNorm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.form.value, norm.eps)
