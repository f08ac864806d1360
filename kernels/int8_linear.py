"""int8 linear layers on the CPU (W8A8): weights and activations are quantized.

oneDNN multiplies them here; `int8_linear_cpu` has the form that the library multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import cache, partial
from time import perf_counter

import torch
from torch import Tensor

from .linear import Linear, row_norms
from .quantized_weight import CodeType, QuantizedWeight

INT8_MAX = 127
NUM_EXACT_PASSES = 3
"""The number of int8 products whose sum is as exact as fp32: each multiplies the rounding error of
the previous ones."""


class Int8Linear(Linear):
    """W8A8: int8 weights with a scale per output, int8 activations with a scale per row (token).

        y[t, o] = (xq[t] · wq[o]) × x_scale[t] × w_scale[o] + bias[o]

    The dot product is exact in int32. Because each row has its own scale, an outlier in one row
    does not reduce another's precision. A row of zeros gives the bias, a row with Inf or NaN gives
    Inf or NaN. CPU only.
    """

    def forward(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """`largest`: as of `quantize_rows`, where x is a part of longer rows."""
        raise NotImplementedError

    def products(self, x: Tensor) -> Tensor:
        result = torch.zeros(x.shape[0], self.out_features, dtype=torch.float32)
        rest = x.float()
        for _ in range(NUM_EXACT_PASSES):
            quantized, scale = quantize_rows(rest)
            result += self._multiply(rest)
            rest = rest - quantized * scale
        return result

    def _multiply(self, x: Tensor) -> Tensor:
        """The products of `x [n, in]`, fp32, without the bias: fp32 `[n, out]`."""
        raise NotImplementedError


class OneDnnInt8Linear(Int8Linear):
    """The weight as oneDNN multiplies it."""

    weight: Tensor
    weight_scale: Tensor
    zero_points: Tensor

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        quantized, scale = weight.codes, weight.scale.float()
        norms = row_norms(quantized) * scale.flatten()
        super().__init__(weight.shape, None if bias is None else bias.float(), norms)
        self._arithmetic = int8_arithmetic()
        if self._arithmetic is not Int8Arithmetic.PLAIN:
            quantized = torch.ops.onednn.qlinear_prepack(quantized, None)
        self.register_buffer("weight", quantized)
        self.register_buffer("weight_scale", scale.flatten())
        self.register_buffer("zero_points", torch.zeros(self.out_features, dtype=torch.int64))
        self.weight_bytes = (
            weight.codes.numel() + self.weight_scale.nbytes + self.zero_points.nbytes
        )

    def forward(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        result = self._multiply(x.reshape(-1, self.in_features), largest)
        if self.bias is not None:
            result += self.bias
        return result.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        quantized, scale = quantize_rows(x, largest)
        factors = (self.weight, self.weight_scale, self.zero_points)
        return _multiply_int8(self._arithmetic, quantized, *factors).mul_(scale)


def serves_int8(weight: QuantizedWeight) -> bool:
    """Whether an `Int8Linear` serves this weight on the CPU: int8 with a scale per output alone."""
    return (
        weight.code_type is CodeType.INT8
        and weight.group >= weight.shape[1]
        and weight.zero is None
        and weight.order is None
    )


class Int8Arithmetic(Enum):
    """A way to multiply int8 matrices; on the processor depends which are exact, which is fast."""

    RAISED = auto()
    """oneDNN takes the codes raised by 128, as bytes with the zero point 128. VNNI multiplies
    unsigned by signed bytes; for two signed ones oneDNN may have only a loop in plain C++."""
    WHOLE = auto()
    """oneDNN takes the codes as they are (AMX)."""
    HALVED = auto()
    """Without VNNI oneDNN adds pairs of products in 16 bits, which saturate: 255 × 127 × 2 does not
    fit, 127 × 127 × 2 does. So the codes are split into their upper seven bits and the last one."""
    PLAIN = auto()
    """No oneDNN: PyTorch's own integer matmul."""


def has_fast_int8() -> bool:
    """Whether oneDNN multiplies bytes faster than floats on this processor."""
    return int8_arithmetic() in (Int8Arithmetic.RAISED, Int8Arithmetic.WHOLE)


@cache
def int8_arithmetic() -> Int8Arithmetic:
    """The fastest exact way: found out by multiplying, whatever the CPU claims to support."""
    seconds = seconds_of_exact_ways()
    return min(seconds, key=seconds.__getitem__, default=Int8Arithmetic.PLAIN)


def seconds_of_exact_ways() -> dict[Int8Arithmetic, float]:
    """The time that oneDNN takes for a product of the largest codes, for each exact method."""
    size = 256
    quantized = torch.full((16, size), INT8_MAX, dtype=torch.int8)
    scale, zero_points = torch.ones(size, dtype=torch.float32), torch.zeros(size, dtype=torch.int64)
    seconds: dict[Int8Arithmetic, float] = {}
    try:
        weight = torch.ops.onednn.qlinear_prepack(quantized[:1].repeat(size, 1), None)
        for way in (Int8Arithmetic.RAISED, Int8Arithmetic.WHOLE, Int8Arithmetic.HALVED):
            product = partial(_multiply_int8, way, quantized, weight, scale, zero_points)
            if bool((product() == size * INT8_MAX**2).all()):
                seconds[way] = _least_seconds(product)
    except (AttributeError, RuntimeError):  # a build or a processor without it
        return {}
    return seconds


def quantize_rows(rows: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 codes `[..., k]` and fp32 scales `[..., 1]` of `rows [..., k]`, symmetric, a scale each.

    codes × scale is nearest to the row; a row of zeros has codes of zero. `largest`: `[..., 1]`,
    the largest absolute value that the codes of a row stand for; None: its own.
    """
    rows = rows.float()
    scale = (largest_of_rows(rows) if largest is None else largest) / INT8_MAX
    scale.clamp_min_(torch.finfo(torch.float32).tiny)
    return (rows / scale).round_().to(torch.int8), scale


def largest_of_rows(rows: Tensor) -> Tensor:
    """The largest absolute value of each row: fp32 `[..., 1]` of `rows [..., k]`."""
    return rows.float().abs().amax(dim=-1, keepdim=True)


def int8_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The reference of Int8Linear, with the sums in int64."""
    x_quantized, x_scale = quantize_rows(x)
    weight_quantized, weight_scale = quantize_rows(weight)
    sums = x_quantized.long() @ weight_quantized.long().T
    result = sums.float() * weight_scale.flatten() * x_scale
    return (result if bias is None else result + bias.float()).to(x.dtype)


def _multiply_int8(
    way: Int8Arithmetic,
    quantized: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zero_points: Tensor,
) -> Tensor:
    """`codes @ weight.T * weight_scale` in fp32; the weight as the way wants it packed."""
    factors = (weight, weight_scale, zero_points)
    match way:
        case Int8Arithmetic.RAISED:
            return _onednn_int8(_raised(quantized), 128, *factors)
        case Int8Arithmetic.WHOLE:
            return _onednn_int8(quantized, 0, *factors)
        case Int8Arithmetic.HALVED:
            # code + 128 = 2 × high + low, high in 0..127, low in 0..1; low is raised by 64 so that
            # both halves go through one call with the zero point 64:
            #   code = 2 × (high - 64) + (low + 64 - 64).
            raised = _raised(quantized)
            halves = torch.cat([raised >> 1, (raised & 1) + 64])
            high, low = _onednn_int8(halves, 64, *factors).chunk(2)
            return low.add_(high, alpha=2)
        case Int8Arithmetic.PLAIN:
            return torch._int_mm(quantized, weight.T).float().mul_(weight_scale)


def _raised(quantized: Tensor) -> Tensor:
    """`codes + 128` of int8 codes, as bytes."""
    return quantized.view(torch.uint8) ^ 128


def _onednn_int8(
    quantized: Tensor, zero_point: int, weight: Tensor, weight_scale: Tensor, zero_points: Tensor
) -> Tensor:
    """`(codes - zero_point) @ weight.T * weight_scale` in fp32; codes int8 or uint8."""
    result: Tensor = torch.ops.onednn.qlinear_pointwise(
        quantized,
        1.0,
        zero_point,
        weight,
        weight_scale,
        zero_points,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return result


def _least_seconds(call: Callable[[], object]) -> float:
    """The faster of two calls, so that one busy moment does not count."""
    seconds = []
    for _ in range(2):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return min(seconds)
