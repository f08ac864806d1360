"""The layers of a base before they are packed, each with the values of its codes if quantized.

Rank 0 computes the reference of a divided base with them: a few rows of a layer's weight are read
and quantized at a time, and multiplied by PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.int8_linear import quantize_rows
from ...kernels.linear_packing import choose_linear
from ...kernels.quantize import WeightFormat, quantize
from ...kernels.quantized_linear import multiply_dequantized
from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.stored_weights import RowReader, Values
from .adapted_module import replace_module
from .load_quantization import LoadQuantization
from .row_matrix import RowMatrix
from .weight_rows import in_pieces, rows_of


@contextmanager
def whole_layers(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Module],
    quantization: LoadQuantization,
    ends_format: WeightFormat | None,
    *,
    multiplies_bytes: bool,
) -> Iterator[None]:
    """Within the context, the model computes with these linear layers as they are quantized, and
    with both ends in `ends_format`, unless that is None. `multiplies_bytes`: as of `choose_linear`.
    """
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    own_weights = {end: end.weight for end in ends}
    for path, module in linears.items():
        replace_module(model, path, _WholeLayer(path, module, quantization, multiplies_bytes))
    try:
        if ends_format is not None:
            _round_ends(own_weights, ends_format)
        yield
    finally:
        for path, module in linears.items():
            replace_module(model, path, module)
        for end, weight in own_weights.items():
            end.weight = weight


class _WholeLayer(nn.Module):
    """A linear layer with the values of its codes.

    Where the served layer multiplies bytes, the inputs are rounded as there.
    """

    def __init__(
        self, path: str, module: nn.Module, quantization: LoadQuantization, multiplies_bytes: bool
    ) -> None:
        super().__init__()
        self._path = path
        self._own = module
        self._quantization = quantization
        self._multiplies_bytes = multiplies_bytes

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in]` to `[..., out]`, in x's dtype."""
        rows, bias = rows_of(self._own), self._own.bias
        assert bias is None or isinstance(bias, Tensor)
        y = x.new_empty(*x.shape[:-1], rows.num_rows)
        for piece in in_pieces(range(rows.num_rows), rows.in_features):
            weight = self._quantization.apply(self._path, rows.read(piece))
            own = slice(piece.start, piece.stop)
            y[..., own] = self._products(x, weight, None if bias is None else bias[own])
        return y

    def _products(self, x: Tensor, weight: Values, bias: Tensor | None) -> Tensor:
        """Those of some rows of the weight, and their bias."""
        if isinstance(weight, Tensor):
            return F.linear(x, weight.to(x.dtype), bias)
        y = multiply_dequantized(self._rounded(x, weight), weight)
        return y if bias is None else y + bias

    def _rounded(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        kind = choose_linear(
            weight,
            dtype=x.dtype,
            device_type=x.device.type,
            multiplies_bytes=self._multiplies_bytes,
        )
        if not kind.multiplies_bytes:
            return x
        codes, scale = quantize_rows(x)
        return codes * scale


def _round_ends(own_weights: Mapping[nn.Module, nn.Parameter], ends_format: WeightFormat) -> None:
    """Give each end that is not quantized in its file the values of its codes."""
    rounded: dict[nn.Parameter, nn.Parameter] = {}
    for end, weight in own_weights.items():
        read = rows_of(end).read
        if isinstance(read(range(1)), QuantizedWeight):
            continue
        if weight not in rounded:  # tied ends share one
            rounded[weight] = _rounded_rows(read, weight, ends_format)
        end.weight = rounded[weight]


def _rounded_rows(
    read: RowReader, weight: nn.Parameter, weight_format: WeightFormat
) -> nn.Parameter:
    """The values of the codes of this weight, whose rows are quantized when they are used."""

    def read_codes(rows: range) -> Values:
        values = read(rows)
        assert isinstance(values, Tensor), "all rows have one form"
        return quantize(values, weight_format)

    rounded = RowMatrix.of(read_codes, weight.shape, weight.dtype, weight.device)
    return nn.Parameter(rounded, requires_grad=False)
