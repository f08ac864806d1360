"""A rank computes its tokens' logits to the bit as one rank does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loraplex.engine.shards.vocabulary_plan import VocabularyPart, divide_vocabulary
from loraplex.kernels.linear import Linear
from loraplex.kernels.linear_packing import pack_linear, pack_readable
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_part import part_of
from support.cpu_kernels import needs_cpu_library

NUM_TOKENS, HIDDEN_SIZE = 1_000, 128
WHOLE = VocabularyPart(range(NUM_TOKENS), NUM_TOKENS)

pytestmark = needs_cpu_library


def dense(weight: Tensor) -> Callable[[VocabularyPart], Linear]:
    return lambda part: pack_linear(weight[part.tokens.start : part.tokens.stop].clone())


def in_codes(weight: Tensor, weight_format: WeightFormat) -> Callable[[VocabularyPart], Linear]:
    whole = quantize(weight, weight_format)

    def pack(part: VocabularyPart) -> Linear:
        own = part_of(whole, part.tokens, range(HIDDEN_SIZE))
        assert own is not None
        return pack_readable(own)

    return pack


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4", "nf4"])
def test_the_parts_of_a_head_have_the_bits_of_the_whole(form: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(NUM_TOKENS, HIDDEN_SIZE), torch.randn(70, HIDDEN_SIZE)
    if form in ("float32", "bfloat16"):
        dtype: torch.dtype = getattr(torch, form)
        pack, x = dense(weight.to(dtype)), x.to(dtype)
    else:
        pack = in_codes(weight, WeightFormat(form))
    with torch.inference_mode():
        for num_ranks in (2, 3, 4):
            parts = [pack(part) for part in divide_vocabulary(NUM_TOKENS, num_ranks)]
            for rows in (x[:1], x[:17], x):
                logits = torch.cat([part(rows) for part in parts], dim=-1)
                assert torch.equal(logits, pack(WHOLE)(rows))
