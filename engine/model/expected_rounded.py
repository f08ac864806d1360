"""The bytes of a rounded copy of a base's linear layers, from the shapes of the base's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...kernels.linear_packing import LinearKind, choose_linear, choose_readable
from ...kernels.linear_sizes import linear_bytes
from ...kernels.quantize import WeightFormat
from ..checkpoint.weight_forms import quantized_form
from .base_model import decoder_linears, sibling_groups, whole_projection
from .embedding_and_head import declare_ends


def rounded_linears_bytes(
    model: PreTrainedModel,
    weight_format: WeightFormat,
    *,
    dtype: torch.dtype,
    device_type: str,
    kept_dense: Collection[str],
    cut: Callable[[str, Tensor], Tensor | None] = lambda _, weight: weight,
) -> int:
    """As `replace_linears` holds them with `rounded`.

    model: on the meta device. kept_dense: the paths of the layers that are not rounded. cut: the
    rank's part of the weight `[out, in]` of the layer at a path; None: another rank has the layer.
    """
    linears, num_bytes = decoder_linears(model), 0
    for paths in sibling_groups(linears):
        if set(paths) <= set(kept_dense):
            continue
        parts = []
        for part in whole_projection([(path, linears[path]) for path in paths]).slices:
            size = (part.out_features, part.in_features)
            weight = cut(part.name, torch.empty(size, dtype=dtype, device="meta"))
            if weight is not None:
                parts.append(weight)
        if not parts:
            continue
        form = quantized_form(torch.cat(parts), weight_format)
        has_all_inputs = form.shape[1] == part.in_features
        kind = choose_linear(
            form,
            dtype=dtype,
            device_type=device_type,
            multiplies_bytes=None if has_all_inputs else False,
        )
        num_bytes += linear_bytes(form, kind, dtype=dtype, device_type=device_type)
    return num_bytes


def rounded_head_bytes(
    model: PreTrainedModel, weight_format: WeightFormat, *, dtype: torch.dtype, device_type: str
) -> int:
    """As `round_head` holds the output head of a base whose ends are not quantized."""
    if declare_ends(model).head is None:
        return 0
    weight = model.get_output_embeddings().weight
    form = quantized_form(torch.empty(weight.shape, dtype=dtype, device="meta"), weight_format)
    kind = choose_readable(form, device_type=device_type)
    if kind is LinearKind.DENSE:
        return 0
    return linear_bytes(form, kind, dtype=dtype, device_type=device_type)
