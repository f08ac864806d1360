"""Products with quantized experts on CUDA: their errors, and times over the experts' bytes.

Products of random routings are compared with those of each expert's values in fp64. Times are of
captured graphs, beside the time that a copy of the chosen experts' bytes takes.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product
from typing import Any

import torch
from benchmarks.attention_check import graph_seconds
from benchmarks.expert_check import SHAPES, TIMED_TOKENS
from benchmarks.quantization_check import TOLERANCE
from benchmarks.quantized_forms_check import copy_bandwidth
from torch import Tensor

from loraplex.kernels.expert_packing import pack_experts
from loraplex.kernels.expert_pairs import ExpertPairs, sort_pairs
from loraplex.kernels.packed_experts import PackedExperts
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from support.quantized_weights import CASES, Case, make_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_EXPERTS, TOP_K = 5, 2
NUM_TOKENS = (1, 5, 48, 200)
"""The last one's experts are dequantized one after another."""
CHECKED = CASES
TIMED = {
    "int8": Case(CodeType.INT8, 128, torch.float16),
    "int4": Case(CodeType.INT4, 128, torch.float16, torch.int8),
    "mxfp4": Case(CodeType.TABLE4, 32),
}


def check_packed_experts(device: str) -> dict[str, Any]:
    """The forms whose products differ from their definition, those in which an infinity in one
    token changes others, and those that are served dense."""
    differing, changed, dense = [], [], []
    with torch.inference_mode():
        for case, dtype in product(CHECKED, DTYPES):
            matrices = [
                make_weight(case, seed).to(torch.device(device)) for seed in range(NUM_EXPERTS)
            ]
            experts = _pack(matrices, device)
            if experts is None:
                dense.append(str(case))
                continue
            for num_tokens in NUM_TOKENS:
                dtype_name = str(dtype).removeprefix("torch.")
                name = f"{case}, {dtype_name}, {num_tokens} tokens"
                x = _random(num_tokens, case.shape[1]).to(device, dtype)
                pairs = _route(num_tokens, NUM_EXPERTS, TOP_K, device)
                clean, exact = experts(x[pairs.tokens], pairs), _defined(x, matrices, pairs)
                error = (clean.double() - exact).abs().max() / exact.abs().max()
                if not error <= TOLERANCE[dtype_name]:
                    differing.append(f"{name}: {float(error):.1e}")
                x[-1, -1] = torch.inf
                others = pairs.tokens < num_tokens - 1
                if not torch.equal(experts(x[pairs.tokens], pairs)[others], clean[others]):
                    changed.append(name)
    return {
        "ok": not differing and not changed,
        "differing": differing,
        "tokens_changed_by_others": changed,
        "served_dense": sorted(set(dense)),
    }


def time_packed_experts(device: str) -> list[dict[str, Any]]:
    """Each form in bf16, over a copy of the bytes of the experts that the tokens chose."""
    bandwidth = copy_bandwidth(device)
    rows = []
    with torch.inference_mode():
        for shape, (name, case) in product(SHAPES[:3], TIMED.items()):
            matrix = make_weight(case._replace(shape=(shape.out_features, shape.in_features)))
            experts = _pack([matrix.to(torch.device(device))] * shape.num_experts, device)
            assert experts is not None
            for num_tokens in TIMED_TOKENS:
                pairs = _route(num_tokens, shape.num_experts, shape.top_k, device, is_captured=True)
                x = _random(num_tokens, shape.in_features).to(device, torch.bfloat16)
                seconds = graph_seconds(partial(experts, x[pairs.tokens], pairs))
                num_chosen = len(set(pairs.experts.tolist()))
                num_bytes = experts.weight_bytes * num_chosen / shape.num_experts
                rows.append(
                    {
                        "form": name,
                        "experts": shape.num_experts,
                        "tokens": num_tokens,
                        "microseconds": round(1e6 * seconds, 2),
                        "over floor": round(seconds * bandwidth / num_bytes, 2),
                    }
                )
    return rows


def _pack(matrices: list[QuantizedWeight], device: str) -> PackedExperts | None:
    return pack_experts(matrices, len(matrices), device_type=torch.device(device).type)


def _route(
    num_tokens: int, num_experts: int, top_k: int, device: str, *, is_captured: bool = False
) -> ExpertPairs:
    rng = random.Random(num_tokens)
    chosen = [rng.sample(range(num_experts), top_k) for _ in range(num_tokens)]
    return sort_pairs(torch.tensor(chosen, device=device), num_experts, is_captured=is_captured)


def _defined(x: Tensor, matrices: list[QuantizedWeight], pairs: ExpertPairs) -> Tensor:
    """Each pair's product in fp64."""
    values = torch.stack([matrix.dequantize().double() for matrix in matrices])
    return torch.einsum("pi,poi->po", x[pairs.tokens].double(), values[pairs.experts])


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))
