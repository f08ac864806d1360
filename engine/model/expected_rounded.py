"""The bytes of a base's rounded copy for drafts, from the shapes of the base's weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...kernels.expert_packing import empty_experts
from ...kernels.linear_packing import LinearKind, choose_linear, choose_readable
from ...kernels.linear_sizes import linear_bytes
from ...kernels.quantize import WeightFormat
from ..checkpoint.weight_forms import quantized_form
from .base_model import decoder_linears, sibling_groups, whole_projection
from .embedding_and_head import declare_ends
from .experts import matrices_shape, parameter_names, served_experts

Cut = Callable[[str, Tensor], Tensor]
"""The rank's part of the weight `[out, in]` of the layer at a path."""


class ExpectedRounded(NamedTuple):
    """The copy that a base would hold, whose layers are multiplied in `dtype`."""

    weight_format: WeightFormat
    dtype: torch.dtype
    device_type: str

    def linears_bytes(
        self, model: PreTrainedModel, kept_dense: Collection[str], cut: Cut = lambda _, part: part
    ) -> int:
        """As `replace_linears` holds them. model: on the meta device. kept_dense: the paths of the
        layers that are not rounded."""
        linears, num_bytes = decoder_linears(model), 0
        for paths in sibling_groups(linears):
            if set(paths) <= set(kept_dense):
                continue
            slices = whole_projection([(path, linears[path]) for path in paths]).slices
            sizes = {part.name: (part.out_features, part.in_features) for part in slices}
            parts = [cut(name, self._empty(size)) for name, size in sizes.items()]
            num_bytes += self._linear_bytes(torch.cat(parts), slices[0].in_features)
        return num_bytes

    def experts_bytes(
        self,
        model: PreTrainedModel,
        num_held: Callable[[str, int], int] = lambda _, num_experts: num_experts,
    ) -> int:
        """As `pack_moe_layers` holds them. num_held: the rank's of the experts at a path."""
        num_bytes = 0
        for path, module in served_experts(model).items():
            for name in parameter_names(module):
                num_experts, *shape = matrices_shape(module, name)
                form = quantized_form(self._empty(tuple(shape)), self.weight_format)
                packed = empty_experts(
                    form, num_held(path, num_experts), device_type=self.device_type
                )
                num_bytes += 0 if packed is None else packed.weight_bytes
        return num_bytes

    def head_bytes(self, model: PreTrainedModel) -> int:
        """As `round_head` holds the output head, if its file does not have it quantized."""
        if declare_ends(model).head is None:
            return 0
        shape = model.get_output_embeddings().weight.shape
        form = quantized_form(self._empty(shape), self.weight_format)
        kind = choose_readable(form, device_type=self.device_type)
        if kind is LinearKind.DENSE:
            return 0
        return linear_bytes(form, kind, dtype=self.dtype, device_type=self.device_type)

    def _linear_bytes(self, weight: Tensor, num_inputs: int) -> int:
        """`num_inputs`: of the whole layer. A rank with a part of them multiplies no bytes."""
        form = quantized_form(weight, self.weight_format)
        kind = choose_linear(
            form,
            dtype=self.dtype,
            device_type=self.device_type,
            multiplies_bytes=None if weight.shape[1] == num_inputs else False,
        )
        return linear_bytes(form, kind, dtype=self.dtype, device_type=self.device_type)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")
