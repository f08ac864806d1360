"""RMSNorm against transformers' own classes: the plain op, the Triton kernel, the CPU's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from loraplex.kernels.rms_norm import NormForm, plain_rms_norm, rms_norm
from support.cpu_kernels import needs_cpu_library

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
EPS = 1e-5
CLASSES: dict[NormForm, Any] = {
    NormForm.ROUNDED_FIRST: LlamaRMSNorm,
    NormForm.ROUNDED_LAST: Olmo2RMSNorm,
    NormForm.OFFSET: Gemma2RMSNorm,
}
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of an element, by another order of the sum: one unit in the last place of the half types."""
MAX_ROUNDED_OTHERWISE = 0.01
FORMS = list(NormForm)
DTYPES = list(ROUNDING)


def draw(dtype: torch.dtype, *shape: int) -> Tensor:
    """Rows of several magnitudes: eps decides in the smallest ones."""
    scales = torch.tensor([1.0, 1e-3, 30.0, 0.0])[torch.arange(shape[-2]) % 4]
    return (torch.randn(shape) * scales[:, None]).to(dtype)


def weighted(dtype: torch.dtype, hidden: int) -> Tensor:
    return (0.5 + torch.rand(hidden)).to(dtype)


def assert_rounds_alike(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    difference = (ours.float() - theirs.float()).abs()
    assert (difference <= ROUNDING[theirs.dtype] * theirs.float().abs()).all()
    if theirs.dtype != torch.float32:
        assert (difference > 0).float().mean() <= MAX_ROUNDED_OTHERWISE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_each_form_is_that_of_a_class_of_transformers(form: NormForm, dtype: torch.dtype) -> None:
    x, weight = draw(dtype, 1, 8, 96), weighted(dtype, 96)
    module = CLASSES[form](96, eps=EPS).to(dtype)
    module.weight.data.copy_(weight)
    expected = module(x).detach()
    assert torch.equal(plain_rms_norm(x, weight, EPS, form), expected)
    assert_rounds_alike(rms_norm(x, weight, EPS, form), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_without_weight_only_normalizes(dtype: torch.dtype) -> None:
    x = draw(dtype, 4, 48)
    expected = Gemma4RMSNorm(48, eps=EPS, with_scale=False)(x)
    for form in FORMS:
        assert_rounds_alike(rms_norm(x, None, EPS, form), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_kernel_computes_what_is_defined(
    interpreted_rms_norm: ModuleType, form: NormForm, dtype: torch.dtype
) -> None:
    for hidden in (64, 100, 600):
        x, weight = draw(dtype, 1, 5, hidden), weighted(dtype, hidden)
        ours = interpreted_rms_norm.rms_norm(x, weight, EPS, form)
        assert_rounds_alike(ours, plain_rms_norm(x, weight, EPS, form))


def test_the_kernel_reads_heads_in_a_slice_of_a_projection(
    interpreted_rms_norm: ModuleType,
) -> None:
    projected = torch.randn(1, 5, 6 * 16)
    heads = projected[..., 32:].view(1, 5, 4, 16)
    for x in (heads, heads.transpose(1, 2), heads[0, :, 1], projected[0, :, ::2]):
        weight = weighted(torch.float32, x.shape[-1])
        ours = interpreted_rms_norm.rms_norm(x, weight, EPS, NormForm.ROUNDED_FIRST)
        assert_rounds_alike(ours, plain_rms_norm(x, weight, EPS, NormForm.ROUNDED_FIRST))


def test_the_kernel_normalizes_without_a_weight(interpreted_rms_norm: ModuleType) -> None:
    x = draw(torch.float32, 4, 48)
    ours = interpreted_rms_norm.rms_norm(x, None, EPS, NormForm.ROUNDED_LAST)
    assert_rounds_alike(ours, plain_rms_norm(x, None, EPS, NormForm.ROUNDED_LAST))


@needs_cpu_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_library_computes_rows_of_any_size_on_any_number_of_threads(dtype: torch.dtype) -> None:
    for hidden in (1, 5, 16, 100, 2048):
        x, weight = draw(dtype, 40, hidden), weighted(dtype, hidden)
        for form in FORMS:
            ours = rms_norm(x, weight, EPS, form)
            assert_rounds_alike(ours, plain_rms_norm(x, weight, EPS, form))
            torch.set_num_threads(2)
            assert torch.equal(rms_norm(x, weight, EPS, form), ours)
            assert torch.equal(rms_norm(x[3:4], weight, EPS, form), ours[3:4])
            torch.set_num_threads(1)


@needs_cpu_library
def test_the_library_reads_heads_in_a_slice_of_a_projection() -> None:
    heads = torch.randn(1, 5, 6 * 16)[..., 32:].view(1, 5, 4, 16)
    weight = weighted(torch.float32, 16)
    for x in (heads, heads.transpose(1, 2), heads[0, :, 1]):
        ours = rms_norm(x, weight, EPS, NormForm.ROUNDED_FIRST)
        assert_rounds_alike(ours, plain_rms_norm(x, weight, EPS, NormForm.ROUNDED_FIRST))


@needs_cpu_library
def test_a_row_that_is_not_finite_changes_no_other() -> None:
    x, weight = draw(torch.float32, 4, 64), weighted(torch.float32, 64)
    expected = rms_norm(x, weight, EPS, NormForm.ROUNDED_FIRST)
    x[1, 7] = torch.nan
    ours = rms_norm(x, weight, EPS, NormForm.ROUNDED_FIRST)
    assert ours[1].isnan().all()
    assert torch.equal(ours[[0, 2, 3]], expected[[0, 2, 3]])
