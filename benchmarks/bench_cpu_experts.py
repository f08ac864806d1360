"""What the experts of MoE layers cost a step on the CPU, by their form and the number of tokens.

    make bench-cpu-experts        ARGS="--tokens 1 16 --json FILE"

All layers' experts multiply one after another, both projections and the activation between them,
with as many threads as PyTorch takes: more weights than any cache holds. Each token is routed to
random experts, other ones in each layer. The forms take turns. The figure is the least time of
several repeats, in milliseconds. `bf16` and `fp32` are dense.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.expert_packing import pack_experts
from loraplex.kernels.expert_pairs import ExpertPairs, sort_pairs
from loraplex.kernels.grouped_linear import grouped_linear
from loraplex.kernels.packed_experts import PackedExperts
from loraplex.kernels.quantize import WeightFormat, quantize

DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMS = (*DENSE, *WeightFormat)
Matrices = Tensor | PackedExperts


class MoeShape(NamedTuple):
    """The sizes of a model's experts."""

    num_layers: int = 2
    num_experts: int = 32
    top_k: int = 4
    hidden_size: int = 1_024
    intermediate_size: int = 512


class Experts(NamedTuple):
    """The experts of one layer."""

    up: Matrices
    down: Matrices

    def multiply(self, x: Tensor, pairs: ExpertPairs) -> Tensor:
        gate, up = grouped_linear(x[pairs.tokens], self.up, pairs).chunk(2, dim=1)
        return grouped_linear(F.silu(gate) * up, self.down, pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in MoeShape()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shape = MoeShape(*(getattr(options, name) for name in MoeShape._fields))
    layers = {form: make_layers(form, shape) for form in options.forms}
    rows = [measure(layers, shape, num_tokens, options.repeats) for num_tokens in options.tokens]
    print(f"ms of all experts, {shape}, {torch.get_num_threads()} threads")
    print("  tokens" + "".join(f"{form:>10}" for form in layers))
    for row in rows:
        print(f"  {row['tokens']:6}" + "".join(f"{row[form]:10.1f}" for form in layers))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def make_layers(form: str, shape: MoeShape) -> list[Experts]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    return [
        Experts(
            *(
                _matrices(form, (shape.num_experts, *size), generator)
                for size in ((2 * inner, hidden), (hidden, inner))
            )
        )
        for _ in range(shape.num_layers)
    ]


def _matrices(form: str, size: tuple[int, int, int], generator: torch.Generator) -> Matrices:
    weight = torch.randn(size, generator=generator).mul_(size[2] ** -0.5)
    if form in DENSE:
        return weight.to(DENSE[form])
    matrices = (quantize(matrix, WeightFormat(form)) for matrix in weight)
    packed = pack_experts(matrices, len(weight), device_type="cpu")
    assert packed is not None, "all are of one form"
    return packed


def measure(
    layers: dict[str, list[Experts]], shape: MoeShape, num_tokens: int, num_repeats: int
) -> dict[str, int | float]:
    """Milliseconds by form."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, shape.hidden_size, generator=generator)
    routings = [
        torch.rand(num_tokens, shape.num_experts, generator=generator).topk(shape.top_k).indices
        for _ in range(shape.num_layers)
    ]
    times: dict[str, list[float]] = {form: [] for form in layers}
    for _ in range(num_repeats + 1):
        for form, experts in layers.items():
            began = time.perf_counter()
            for layer, routing in zip(experts, routings, strict=True):
                layer.multiply(x, sort_pairs(routing, shape.num_experts))
            times[form].append((time.perf_counter() - began) * 1e3)
    return {"tokens": num_tokens, **{form: min(taken[1:]) for form, taken in times.items()}}


if __name__ == "__main__":
    main()
