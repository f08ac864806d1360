"""Rotary embedding against transformers' own: the plain op, the Triton kernel, the CPU's."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from loraplex.kernels.rotary import is_rotatable, plain_rotary, rotary
from support.cpu_kernels import needs_cpu_library

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # Triton 3.6's interpreter
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_HEADS, NUM_KV_HEADS = 3, 2
Arguments = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(num_tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> Arguments:
    """Queries and keys as a model gives them: slices of a projection, heads before tokens."""
    heads = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
    projected = torch.randn(1, num_tokens, sum(heads) * dim).to(dtype)
    q, k, _ = (
        part.view(1, num_tokens, -1, dim).transpose(1, 2)
        for part in projected.split([count * dim for count in heads], dim=-1)
    )
    angles = 3 * torch.randn(1, num_tokens, dim // 2).repeat(1, 1, 2)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_equals_that_of_transformers_to_the_bit(dim: int, dtype: torch.dtype) -> None:
    for num_tokens in (1, 5, 70):
        arguments = draw(num_tokens, dim, dtype)
        before = [tensor.clone() for tensor in arguments]
        expected = apply_rotary_pos_emb(*arguments)
        for ours, theirs in zip(plain_rotary(*arguments), expected, strict=True):
            assert torch.equal(ours, theirs)
        for tensor, unchanged in zip(arguments, before, strict=True):
            assert torch.equal(tensor, unchanged)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_the_kernel_computes_what_is_defined(
    interpreted_rotary: ModuleType, dim: int, dtype: torch.dtype
) -> None:
    for num_tokens in (1, 5):
        arguments = draw(num_tokens, dim, dtype)
        expected = plain_rotary(*arguments)
        for ours, theirs in zip(interpreted_rotary.rotary(*arguments), expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.transpose(1, 2).is_contiguous(), "what the cache and attention read"


@needs_cpu_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 20, 64, 96])
def test_the_library_computes_what_is_defined(dim: int, dtype: torch.dtype) -> None:
    for num_tokens in (1, 5, 70):
        q, k, cos, sin = draw(num_tokens, dim, dtype)
        before = [tensor.clone() for tensor in (q, k)]
        rotated = rotary(q, k, cos, sin)
        for ours, theirs in zip(rotated, plain_rotary(q, k, cos, sin), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.transpose(1, 2).is_contiguous(), "what the cache and attention read"
        torch.set_num_threads(2)
        assert all(map(torch.equal, rotary(q, k, cos, sin), rotated))
        torch.set_num_threads(1)
        assert torch.equal(q, before[0])
        assert torch.equal(k, before[1])


def test_only_whole_heads_of_one_dtype_in_one_batch_are_rotated() -> None:
    q, k, cos, sin = draw(5, 16)
    assert is_rotatable(q, k, cos, sin)
    for refused in (
        (q, k, cos[..., :8], sin[..., :8]),
        (q, k, cos.bfloat16(), sin.bfloat16()),
        (q.double(), k.double(), cos.double(), sin.double()),
        (q, k, cos[0], sin[0]),
        (q, k[:, :, :4], cos, sin),
        (q[0], k[0], cos, sin),
        (q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), cos, sin),
        (q.mT.contiguous().mT, k, cos, sin),
        (q[..., :15], k[..., :15], cos[..., :15], sin[..., :15]),
    ):
        assert not is_rotatable(*refused)
