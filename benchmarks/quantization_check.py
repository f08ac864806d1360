"""A quantized base on this device: compared with plain PyTorch, and timed against the exact one.

Products are compared with those of the same codes in fp64, and a whole base's logits with
transformers' own model with the dequantized weights. On CUDA, calls are captured into a graph, as
decode steps are, and weights and inputs alternate, so that none is read from a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model.base_model import weight_format
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.linear import Linear
from loraplex.kernels.linear_packing import pack_linear
from loraplex.kernels.quantize import WeightFormat
from support.models import make_tiny_llama
from support.paged import paged_logits
from support.quantized import load_rounded, rounded_weight

FORMS = (Quantization.INT8, Quantization.INT4)
BASE_SHAPE: dict[str, Any] = {
    "hidden_size": 320,
    "intermediate_size": 700,
    "num_hidden_layers": 3,
    "initializer_range": 0.05,
}
SEQUENCES = [[7, 3, 200, 41], list(range(40, 90)), list(range(250, 0, -1))]
PRODUCTS = (
    ("bfloat16", 4096, 512, (5, 20)),
    ("bfloat16", 1000, 300, (1, 40, 600)),
    ("float16", 1000, 300, (3,)),
    ("float32", 1000, 300, (7, 100)),
)
"""dtype, in_features, out_features, rows."""
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}
"""Of the largest product: half a unit in its last place, and the sums' rounding."""
CPU_TOLERANCE = {Quantization.INT8: 0.03, Quantization.INT4: 8e-3}
"""The CPU rounds activations too: to int8 codes, or to bf16."""
BASE_TOLERANCE, CPU_BASE_TOLERANCE = 1e-4, 0.08
"""Of the largest logit, fp32."""
LAYERS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256))
"""in_features and out_features of an 8B model's projections, and of its head."""
ROWS = (1, 16, 32, 64, 512, 2048)
COLD_BYTES = 100 << 20
"""Of weights in turn: twice an H100's L2."""
MAX_CALLS = 16
NUM_INPUTS = 4
NUM_REPLAYS = 7


@dataclass(frozen=True)
class LinearTiming:
    """One linear layer at one number of rows."""

    in_features: int
    out_features: int
    form: str
    """`none` is cuBLAS in bf16."""
    rows: int
    microseconds: float
    gigabytes_per_second: float
    """Of the weight."""


def check_quantization(directory: Path, *, device: str) -> dict[str, Any]:
    """The largest errors of products and of a whole base's logits, for each form."""
    forms = {str(form): _check_form(form, directory / form, device) for form in FORMS}
    return {"ok": all(result["ok"] for result in forms.values()), **forms}


def _check_form(form: Quantization, directory: Path, device: str) -> dict[str, Any]:
    with torch.inference_mode():
        products = {name: _product_error(form, *case, device) for name, case in _cases(device)}
        others = {name: _others_changed(form, *case, device) for name, case in _cases(device)}
    base_error = _base_error(form, directory, device)
    is_cpu = device == "cpu"
    bounds = {
        name: CPU_TOLERANCE[form] if is_cpu else TOLERANCE[case[0]] for name, case in _cases(device)
    }
    is_right = all(error <= bounds[name] for name, error in products.items())
    is_right &= base_error <= (CPU_BASE_TOLERANCE if is_cpu else BASE_TOLERANCE)
    return {
        "ok": is_right and not any(others.values()),
        "product_errors": products,
        "rows_changed_by_others": sum(others.values()),
        "base_error": base_error,
    }


def _cases(device: str) -> Iterator[tuple[str, tuple[str, int, int, int]]]:
    for dtype, in_features, out_features, rows in PRODUCTS:
        if device == "cpu" and dtype == "float16":
            continue  # not served there
        for count in rows:
            yield (
                f"{dtype} {in_features}x{out_features} {count} rows",
                (dtype, in_features, out_features, count),
            )


def _product_error(
    form: Quantization, dtype: str, in_features: int, out_features: int, rows: int, device: str
) -> float:
    """The largest error of a product, relative to the largest product."""
    linear, weight, bias = _linear(form, dtype, in_features, out_features, device)
    x = _random(rows, in_features, dtype=dtype, device=device)
    values = rounded_weight(weight, WeightFormat(form))
    exact = F.linear(x.double(), values.double(), bias.double())
    return float((linear(x).double() - exact).abs().max() / exact.abs().max())


def _others_changed(
    form: Quantization, dtype: str, in_features: int, out_features: int, rows: int, device: str
) -> int:
    """How many rows change when the last one holds an infinity."""
    linear, _, _ = _linear(form, dtype, in_features, out_features, device)
    x = _random(rows, in_features, dtype=dtype, device=device)
    clean = linear(x)[:-1]
    x[-1, in_features // 2] = torch.inf
    return int((linear(x)[:-1] != clean).any(dim=1).sum())


def _base_error(form: Quantization, directory: Path, device: str) -> float:
    """The largest error of a logit of a small base, in fp32."""
    path = make_tiny_llama(directory, **BASE_SHAPE)
    config = EngineConfig(str(path), device=device, dtype="float32", quantization=form)
    served = paged_logits(load_base_model(config), SEQUENCES)
    model = load_rounded(path, WeightFormat(form))
    errors = []
    for tokens, logits in zip(SEQUENCES, served, strict=True):
        with torch.inference_mode():
            exact = model(torch.tensor([tokens]), use_cache=False).logits[0]
        errors.append((logits.cpu() - exact).abs().max() / exact.abs().max())
    return float(max(errors))


def time_quantization() -> list[dict[str, Any]]:
    """Each layer of an 8B model in bf16, int8 and int4 on CUDA."""
    with torch.inference_mode():
        return [
            asdict(timing)
            for in_features, out_features in LAYERS
            for form in Quantization
            for timing in _time_form(form, in_features, out_features)
        ]


def _time_form(form: Quantization, in_features: int, out_features: int) -> Iterator[LinearTiming]:
    linear, _, _ = _linear(form, "bfloat16", in_features, out_features, "cuda", has_bias=False)
    num_calls = min(MAX_CALLS, 1 + COLD_BYTES // linear.weight_bytes)
    linears = [linear, *(deepcopy(linear) for _ in range(num_calls - 1))]
    for rows in ROWS:
        inputs = [
            _random(rows, in_features, dtype="bfloat16", device="cuda") for _ in range(NUM_INPUTS)
        ]
        seconds = seconds_captured(linears, inputs)
        yield LinearTiming(
            in_features,
            out_features,
            form,
            rows,
            microseconds=round(1e6 * seconds, 2),
            gigabytes_per_second=round(linear.weight_bytes / seconds / 1e9, 1),
        )


def seconds_captured(linears: list[Linear], inputs: list[Tensor]) -> float:
    """One call's time in a captured graph that calls each layer once."""
    linears[0](inputs[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index, linear in enumerate(linears):
            linear(inputs[index % len(inputs)])
    graph.replay()
    milliseconds: list[float] = []
    for _ in range(NUM_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return median(milliseconds) / 1e3 / len(linears)


def _linear(
    form: Quantization,
    dtype: str,
    in_features: int,
    out_features: int,
    device: str,
    *,
    has_bias: bool = True,
) -> tuple[Linear, Tensor, Tensor]:
    """A layer with random weight and bias, which come with it."""
    weight = _random(out_features, in_features, dtype=dtype, device=device)
    bias = _random(out_features, dtype=dtype, device=device)
    packed = LoadQuantization(weight_format(form)).apply("layer", weight)
    linear = pack_linear(packed, bias if has_bias else None, dtype=weight.dtype)
    return linear, weight, bias


def _random(*sizes: int, dtype: str, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator, device=device).to(getattr(torch, dtype))
