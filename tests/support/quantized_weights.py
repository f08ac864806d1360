"""Quantized weights of every form, and their values computed element by element."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight

RANGES = {
    CodeType.INT8: (-128, 128),
    CodeType.INT4: (-8, 8),
    CodeType.TABLE4: (0, 16),
    CodeType.FP8: (-128, 127),
}

TABLE = torch.randn(16, generator=torch.Generator().manual_seed(16))


class Case(NamedTuple):
    """One form of a quantized weight."""

    code_type: CodeType
    group: int
    scale_dtype: torch.dtype = torch.float32
    zero_dtype: torch.dtype | None = None
    has_order: bool = False
    shape: tuple[int, int] = (48, 256)

    def __str__(self) -> str:
        scale = str(self.scale_dtype).removeprefix("torch.")
        zero = "" if self.zero_dtype is None else f"-zero-{self.zero_dtype}".replace("torch.", "")
        order = "-ordered" if self.has_order else ""
        size = "x".join(map(str, self.shape))
        return f"{self.code_type}-group{self.group}-{scale}{zero}{order}-{size}"


CASES = (
    Case(CodeType.INT8, 256),
    Case(CodeType.INT8, 16, torch.float16),
    Case(CodeType.INT8, 32, torch.float32, torch.float32),
    Case(CodeType.INT8, 128, torch.float16, torch.int8, True),
    Case(CodeType.INT4, 32, torch.float32, torch.float32),
    Case(CodeType.INT4, 64, torch.float16, torch.int8),
    Case(CodeType.INT4, 128, torch.bfloat16),
    Case(CodeType.INT4, 128, torch.float16, torch.int8, True),
    Case(CodeType.INT4, 256, torch.float32),
    Case(CodeType.TABLE4, 64),
    Case(CodeType.TABLE4, 32),
    Case(CodeType.FP8, 256),
    Case(CodeType.FP8, 128, torch.bfloat16),
    # Sizes that fill no panel and no group.
    Case(CodeType.INT8, 300, shape=(5, 300)),
    Case(CodeType.INT4, 128, torch.bfloat16, shape=(19, 300)),
    Case(CodeType.INT4, 32, torch.float16, torch.int8, True, shape=(33, 77)),
    Case(CodeType.TABLE4, 64, shape=(1, 33)),
    Case(CodeType.FP8, 128, shape=(17, 129)),
)


def make_weight(case: Case, seed: int = 0) -> QuantizedWeight:
    """Random codes; every code of the type occurs if there are enough elements."""
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = case.shape
    groups = -(-in_features // case.group)
    codes = torch.randint(*RANGES[case.code_type], case.shape, generator=generator)
    if case.code_type is CodeType.FP8:
        codes[codes == -1] = -2  # 0xFF and 0x7F are NaN
    scale = (torch.rand(out_features, groups, generator=generator) + 0.5) / 50
    sign = torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    zero = None
    if case.zero_dtype is not None:
        zero = torch.randn(out_features, groups, generator=generator) * 3
        zero = zero.to(case.zero_dtype)
    return QuantizedWeight(
        case.code_type,
        codes.to(torch.int8),
        (scale * sign).to(case.scale_dtype),
        case.group,
        zero=zero,
        table=TABLE if case.code_type is CodeType.TABLE4 else None,
        order=torch.randperm(in_features, generator=generator) if case.has_order else None,
    )


def plain_values(weight: QuantizedWeight) -> Tensor:
    """fp32 `[out, in]` by the formula, a group of columns at a time."""
    out_features, in_features = weight.shape
    values = torch.empty(out_features, in_features)
    for column in range(in_features):
        codes, group = weight.codes[:, column], column // weight.group
        if weight.code_type is CodeType.FP8:
            numbers = codes.view(torch.float8_e4m3fn).float()
        elif weight.table is not None:
            numbers = torch.tensor([weight.table[code].item() for code in codes.tolist()])
        else:
            numbers = codes.float()
        if weight.zero is not None:
            numbers = numbers - weight.zero[:, group].float()
        place = column if weight.order is None else int(weight.order[column])
        values[:, place] = numbers * weight.scale[:, group].float()
    return values


def inputs_of_15_bits(*shape: int) -> Tensor:
    """Random fp32 numbers that no product rounds (decision 55), from -4 to 4."""
    return torch.randint(1 - 2**15, 2**15, shape) * 2.0**-13
