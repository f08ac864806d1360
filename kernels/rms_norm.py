"""RMSNorm in one call of a kernel.

`plain_rms_norm` defines the operation. It is what transformers' classes compute, which differ in
where they round and in what they multiply by.
"""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import Tensor

from . import cpu_library


class NormForm(Enum):
    """How a normalized row becomes the result. Normalizing itself is always done in fp32."""

    ROUNDED_FIRST = auto()
    """Rounded to the input's dtype, then multiplied by the weight in that dtype, as in Llama."""
    ROUNDED_LAST = auto()
    """Multiplied by the weight in fp32, then rounded, as in OLMo 2."""
    OFFSET = auto()
    """As ROUNDED_LAST with 1 + weight, as in Gemma."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, form: NormForm) -> Tensor:
    """Divide each row of `x [..., hidden]` by its root mean square; new memory of x's dtype.

    weight: `[hidden]` in x's dtype; None: not multiplied. eps is added to the mean square. A row's
    result does not depend on the other rows.
    """
    if x.is_cuda:
        from . import rms_norm_triton  # Triton is not installed everywhere

        return rms_norm_triton.rms_norm(x, weight, eps, form)
    function = cpu_library.function("rms_norm", x.dtype)
    if function is None:
        return plain_rms_norm(x, weight, eps, form)
    x = x.contiguous()
    out = torch.empty_like(x)
    function(
        x.data_ptr(),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        x.numel() // x.shape[-1],
        x.shape[-1],
        eps,
        form.value,
        torch.get_num_threads(),
    )
    return out


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float, form: NormForm) -> Tensor:
    """The definition of `rms_norm`."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalized.to(x.dtype)
    if form is NormForm.ROUNDED_FIRST:
        return weight * normalized.to(x.dtype)
    factor = weight.float() + 1 if form is NormForm.OFFSET else weight.float()
    return (normalized * factor).to(x.dtype)
