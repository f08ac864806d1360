"""The weights in a base's files as they will be read, from the headers alone.

Reading a weight takes as long as its file. Its form, such as the bits of its codes and the groups
of its scales, follows from its headers, and tells how it is served and in how many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.quantize import MXFP4_GROUP, WeightFormat, quantize
from ...kernels.quantized_weight import CodeType, QuantizedWeight
from ..gguf.blocks import unpack_blocks
from ..gguf.file import GgufTensor, tensor_names
from ..gguf.header import GGUF_FILE
from ..gguf.kinds import BLOCK_SIZES, DENSE_KINDS
from .base_config import quantization_settings, read_config_file
from .file_slices import DTYPES
from .packed_weights import PackedWeight, Packing, find_packed_weights
from .stored_tensors import StoredTensor, read_stored_tensors
from .stored_weights import Values
from .text_part import of_text_part
from .unpacking import scale_by_group

_META = torch.device("meta")
_GGUF_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TABLE = torch.empty(16, device=_META, dtype=torch.float32)
"""One object for all weights: tables without values cannot be compared otherwise."""


class WeightForm(NamedTuple):
    """One weight of a base's files, without its values."""

    shape: tuple[int, ...]
    format: str | None
    """Such as gptq-int4 or gguf-q4_k; None: it is not quantized."""
    file_bytes: int
    values: Values
    """On the meta device, in the form in which it is read; of quantized stacked experts, the matrix
    of one."""


def read_weight_forms(folder: Path) -> dict[str, WeightForm]:
    """All weights of the base's files by the model's names.

    Raises a subclass of UnsupportedModel. GPTQ's order of inputs and zero points are taken from the
    settings `desc_act` and `sym`, as only the values tell whether they are trivial.
    """
    config = read_config_file(folder)
    if (folder / GGUF_FILE).exists():
        tensors = tensor_names(folder / GGUF_FILE, config)
        return {name: _gguf_form(tensor) for name, tensor in tensors.items()}
    stored = read_stored_tensors(folder)
    packed = find_packed_weights(stored, config, folder)
    settings = quantization_settings(config, folder)
    forms = {name: _plain_form(tensor) for name, tensor in packed.rest.items()}
    for name, weight in packed.weights.items():
        parts = {role: stored[part] for role, part in weight.parts.items()}
        values = _Parts(weight, parts, settings).values()
        file_bytes = sum(map(_file_bytes, parts.values()))
        forms[name] = WeightForm(weight.shape, weight.format, file_bytes, values)
    return of_text_part(forms, config, folder)


def repeat_row(row: QuantizedWeight, num_rows: int) -> QuantizedWeight:
    """A weight without values of so many rows of the form of `row [1, in]`."""
    return _quantized(
        row.code_type,
        (num_rows, row.shape[1]),
        row.group,
        row.scale.dtype,
        zero_dtype=None if row.zero is None else row.zero.dtype,
    )


def quantized_form(
    weight: Tensor, weight_format: WeightFormat, group_size: int | None = None
) -> QuantizedWeight:
    """A weight without values, as `quantize` gives it."""
    num_rows, in_features = weight.shape
    return repeat_row(_quantized_row(in_features, weight_format, group_size), num_rows)


@cache
def _quantized_row(
    in_features: int, weight_format: WeightFormat, group_size: int | None
) -> QuantizedWeight:
    """All rows have the form of one. It has values: on the meta device, quantizing is slow."""
    return quantize(torch.ones(1, in_features, dtype=torch.float32), weight_format, group_size)


def _plain_form(tensor: StoredTensor) -> WeightForm:
    values = torch.empty(tensor.shape, dtype=_dtype(tensor), device=_META)
    return WeightForm(tensor.shape, None, _file_bytes(tensor), values)


def _gguf_form(tensor: GgufTensor) -> WeightForm:
    kind, shape = tensor.kind, tensor.shape
    if kind in DENSE_KINDS:
        dtype = torch.float32 if tensor.is_one_more else _GGUF_DTYPES[kind]
        values: Values = torch.empty(shape, dtype=dtype, device=_META)
        return WeightForm(shape, None, tensor.num_bytes, values)
    if tensor.is_quantized:
        values = repeat_row(_gguf_row(kind, shape[1]), shape[0])
    else:
        values = torch.empty(shape, device=_META, dtype=torch.float32)
    return WeightForm(shape, f"gguf-{kind.lower()}", tensor.num_bytes, values)


@cache
def _gguf_row(kind: str, in_features: int) -> QuantizedWeight:
    size = BLOCK_SIZES[kind]
    num_bytes = in_features // size.values * size.num_bytes
    return unpack_blocks(
        torch.empty((1, num_bytes), dtype=torch.uint8, device=_META), kind, in_features
    )


class _Parts:
    """The tensors of a quantized weight, by role."""

    def __init__(
        self, weight: PackedWeight, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]
    ) -> None:
        self._weight = weight
        self._parts = parts
        self._settings = settings
        """Of the whole base."""

    def values(self) -> Values:
        """As `unpack` gives them."""
        readers: Mapping[Packing, Callable[[], Values]] = {
            Packing.GPTQ: self._gptq,
            Packing.AWQ: lambda: self._integers("scales", has_zero=True),
            Packing.PACKED_INTEGERS: self._packed_integers,
            Packing.SCALED: self._scaled,
            Packing.BNB4: self._bnb4,
            Packing.BNB8: self._bnb8,
            Packing.FP4: self._fp4,
            Packing.MXFP4_EXPERTS: self._mxfp4_expert,
        }
        return readers[self._weight.packing]()

    def _gptq(self) -> QuantizedWeight:
        return self._integers(
            "scales",
            has_zero="qzeros" in self._parts and self._settings.get("sym") is not True,
            has_order="g_idx" in self._parts and self._settings.get("desc_act") is True,
        )

    def _packed_integers(self) -> QuantizedWeight:
        return self._integers(
            "weight_scale",
            has_zero="weight_zero_point" in self._parts,
            has_order="weight_g_idx" in self._parts,
        )

    def _integers(self, scale: str, *, has_zero: bool, has_order: bool = False) -> QuantizedWeight:
        code_type = CodeType.INT8 if self._weight.settings["bits"] > 4 else CodeType.INT4
        zero_dtype = torch.int8 if has_zero else None
        return self._of_groups(
            code_type, _dtype(self._parts[scale]), zero_dtype=zero_dtype, has_order=has_order
        )

    def _scaled(self) -> QuantizedWeight:
        stored = self._parts["scale"]
        scale = torch.empty(stored.shape, dtype=_scale_dtype(stored), device=_META)
        scale, group = scale_by_group(scale, self._weight.shape, self._weight.settings["block"])
        is_int8 = self._parts["weight"].dtype == "I8"
        return _quantized(
            CodeType.INT8 if is_int8 else CodeType.FP8,
            self._matrix,
            group,
            scale.dtype,
            zero_dtype=torch.int8 if "weight_zero_point" in self._parts else None,
        )

    def _bnb4(self) -> Values:
        block = self._weight.settings["block"]
        if self._matrix[1] % block:  # blocks that end within a row
            return torch.empty(self._matrix, device=_META, dtype=torch.float32)
        return _quantized(CodeType.TABLE4, self._matrix, block, torch.float32)

    def _bnb8(self) -> QuantizedWeight:
        return _quantized(CodeType.INT8, self._matrix, self._matrix[1], torch.float32)

    def _fp4(self) -> QuantizedWeight:
        return self._of_groups(CodeType.TABLE4, _scale_dtype(self._parts["weight_scale"]))

    def _mxfp4_expert(self) -> QuantizedWeight:
        _, in_features, out_features = self._weight.shape
        size = (out_features, in_features)
        return _quantized(CodeType.TABLE4, size, MXFP4_GROUP, torch.bfloat16)

    def _of_groups(
        self,
        code_type: CodeType,
        scale_dtype: torch.dtype,
        *,
        zero_dtype: torch.dtype | None = None,
        has_order: bool = False,
    ) -> QuantizedWeight:
        return _quantized(
            code_type,
            self._matrix,
            self._weight.settings["group"],
            scale_dtype,
            zero_dtype=zero_dtype,
            has_order=has_order,
        )

    @property
    def _matrix(self) -> tuple[int, int]:
        out_features, in_features = self._weight.shape
        return out_features, in_features


def _quantized(
    code_type: CodeType,
    shape: tuple[int, int],
    group: int,
    scale_dtype: torch.dtype,
    *,
    zero_dtype: torch.dtype | None = None,
    has_order: bool = False,
) -> QuantizedWeight:
    by_group = (shape[0], -(-shape[1] // group))
    zero = None if zero_dtype is None else torch.empty(by_group, dtype=zero_dtype, device=_META)
    return QuantizedWeight(
        code_type,
        torch.empty(shape, dtype=torch.int8, device=_META),
        torch.empty(by_group, dtype=scale_dtype, device=_META),
        group,
        zero=zero,
        table=_TABLE if code_type is CodeType.TABLE4 else None,
        order=_order(shape[1]) if has_order else None,
    )


@cache
def _order(in_features: int) -> Tensor:
    """One object for all weights of this width: siblings are quantized for the same inputs."""
    return torch.empty(in_features, dtype=torch.int64, device=_META)


def _scale_dtype(scale: StoredTensor) -> torch.dtype:
    """Scales of eight bits become fp32."""
    if scale.dtype == "U8":  # exponents
        return torch.bfloat16
    return torch.float32 if scale.dtype == "F8_E4M3" else _dtype(scale)


def _dtype(tensor: StoredTensor) -> torch.dtype:
    return DTYPES.get(tensor.dtype, torch.uint8)  # all others are spare


def _file_bytes(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * _dtype(tensor).itemsize
