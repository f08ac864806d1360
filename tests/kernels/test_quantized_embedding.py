"""Embeddings whose tables are quantized, against PyTorch's own embedding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from loraplex.kernels.linear_packing import pack_readable
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_embedding import QuantizedEmbedding
from loraplex.kernels.quantized_linear import DequantizedLinear

CPU = torch.device("cpu")
TOKENS = torch.tensor([[0, 18, 18], [7, 16, 15]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", WeightFormat)
def test_tokens_get_the_rows_that_the_codes_stand_for(
    form: WeightFormat, dtype: torch.dtype
) -> None:
    weight = quantize(torch.randn(19, 70), form)
    expected = F.embedding(TOKENS, weight.dequantize()).to(dtype) * 1.5
    for linear in (pack_readable(weight), DequantizedLinear(weight)):
        embedding = QuantizedEmbedding(linear, scale=1.5, dtype=dtype, device=CPU)
        assert (embedding.num_embeddings, embedding.embedding_dim) == (19, 70)
        found = embedding(TOKENS)
        assert found.dtype == dtype
        assert torch.equal(found, expected)
