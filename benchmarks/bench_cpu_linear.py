"""What the base's linear layers cost a step on the CPU, by their form and the number of rows.

    make bench-cpu-linear         ARGS="--shape 120m --rows 1 16 --json FILE"
    make bench-cpu-linear         ARGS="--dtype bfloat16 --threads 1"

All linear layers of a random Llama, the output head included, multiply one after another, with as
many threads as PyTorch takes: more weights than any cache holds. The shapes `head-...` are an
output head of 2,048 inputs alone. The forms take turns. The figure is the least time of several
repeats, in milliseconds: with one thread the processor's time, which other processes change little.
Weights are exact in bf16, but for those of `fp32`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from benchmarks.bench_mixed_step import SHAPES
from torch import Tensor

from loraplex.api.bench.models import BaseShape
from loraplex.kernels.bfloat16_linear_cpu import BFloat16PanelLinear
from loraplex.kernels.int8_linear import OneDnnInt8Linear
from loraplex.kernels.int8_linear_cpu import Int8PanelLinear, serves_int8_panels
from loraplex.kernels.linear import Linear, PackedLinear
from loraplex.kernels.linear_cpu import PanelLinear
from loraplex.kernels.quantize import WeightFormat, quantize
from loraplex.kernels.quantized_linear_cpu import QuantizedPanelLinear


def _quantized(weight: Tensor, *, weight_format: WeightFormat) -> Linear:
    return QuantizedPanelLinear(quantize(weight, weight_format))


W8A8: dict[str, Callable[[Tensor], Linear]] = {
    "W8A8": lambda weight: OneDnnInt8Linear(quantize(weight, WeightFormat.INT8))
}
"""Weights and activations in int8, by oneDNN and, where it serves them, by the CPU library."""
if serves_int8_panels():
    W8A8["W8A8-library"] = lambda weight: Int8PanelLinear(quantize(weight, WeightFormat.INT8))


MODELS = {"120m": BaseShape(), **SHAPES}
HEADS = {"head-32k": (32_000, 2_048), "head-128k": (128_256, 2_048)}
FORMS: dict[str, Callable[[Tensor], Linear]] = {
    "oneDNN": PackedLinear,
    "fp32": lambda weight: PanelLinear(weight + 2.0**-20),
    "bf16": PanelLinear,
    **W8A8,
    **{each: partial(_quantized, weight_format=each) for each in WeightFormat},
}
"""oneDNN in fp32; the CPU library in fp32, with weights in fp32, in bf16 and quantized; W8A8."""
BFLOAT16_FORMS: dict[str, Callable[[Tensor], Linear]] = {
    "oneDNN": PackedLinear,
    "library": BFloat16PanelLinear,
    **W8A8,
}
"""In bf16, by oneDNN and by the CPU library; W8A8."""
DTYPES = {"float32": (torch.float32, FORMS), "bfloat16": (torch.bfloat16, BFLOAT16_FORMS)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=(*MODELS, *HEADS), default="120m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--forms", nargs="+", choices={**FORMS, **BFLOAT16_FORMS})
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = options.shape
    sizes = [HEADS[shape]] if shape in HEADS else layer_sizes(MODELS[shape])
    dtype, makers = DTYPES[options.dtype]
    forms = {name: make_layers(makers[name], sizes, dtype) for name in options.forms or makers}
    rows = [measure(forms, num_rows, options.repeats, dtype) for num_rows in options.rows]
    print(f"ms of all linear layers, {shape}, {options.dtype}, {options.threads} threads")
    print("  rows" + "".join(f"{name:>10}" for name in forms))
    for row in rows:
        print(f"  {row['rows']:4}" + "".join(f"{row[name]:10.1f}" for name in forms))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def layer_sizes(shape: BaseShape) -> list[tuple[int, int]]:
    """Outputs and inputs of each fused projection, and of the head."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv_size = hidden // shape.num_heads * shape.num_kv_heads
    layer = [(hidden + 2 * kv_size, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    return [*layer * shape.num_layers, (shape.vocab_size, hidden)]


def make_layers(
    form: Callable[[Tensor], Linear], sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[Linear]:
    generator = torch.Generator().manual_seed(0)
    return [
        form(torch.randn(size, generator=generator).mul_(size[1] ** -0.5).bfloat16().to(dtype))
        for size in sizes
    ]


def measure(
    forms: dict[str, list[Linear]], num_rows: int, num_repeats: int, dtype: torch.dtype
) -> dict[str, int | float]:
    """Milliseconds by form."""
    (layers, *_) = forms.values()
    sizes = {layer.in_features for layer in layers}
    inputs = {size: torch.randn(num_rows, size, dtype=dtype) for size in sizes}
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(num_repeats + 1):
        for name, layers in forms.items():
            began = now()
            for layer in layers:
                layer(inputs[layer.in_features])
            times[name].append((now() - began) * 1e3)
    return {"rows": num_rows, **{name: min(taken[1:]) for name, taken in times.items()}}


if __name__ == "__main__":
    main()
