"""Products with quantized weights of every form on CUDA: their errors, and times over their bytes.

Products are compared with those of the weight's values in fp64. Times are of captured graphs in
which weights alternate, so that none is read from a cache; each is given beside the time that a
copy of the weight's bytes takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.quantization_check import COLD_BYTES, MAX_CALLS, TOLERANCE, seconds_captured
from torch import Tensor

from loraplex.engine.memory.device_peak import measure_peak
from loraplex.engine.model.load_quantization import LoadQuantization
from loraplex.kernels.linear import DenseLinear, Linear
from loraplex.kernels.quantized_weight import CodeType, QuantizedWeight
from support.quantized_weights import CASES, Case, make_weight

Pack = Callable[[QuantizedWeight, Tensor | None, torch.dtype], Linear]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHECKED_ROWS = (1, 20, 600)
"""One tile, several, and the weight written out."""
CHECKED = (
    *CASES,
    Case(CodeType.INT8, 32, torch.float16, shape=(300, 4096)),
    Case(CodeType.INT4, 64, torch.float16, torch.int8, True, shape=(300, 4096)),
    Case(CodeType.TABLE4, 64, shape=(300, 4096)),
    Case(CodeType.FP8, 4096, shape=(300, 4096)),
)
"""The last ones' rows are shared by several programs."""
TIMED = (
    Case(CodeType.INT8, 4096),
    Case(CodeType.INT8, 32, torch.float16),
    Case(CodeType.INT8, 16, torch.float32),
    Case(CodeType.INT4, 128, torch.bfloat16),
    Case(CodeType.INT4, 128, torch.float16, torch.int8),
    Case(CodeType.INT4, 128, torch.float16, torch.int8, True),
    Case(CodeType.INT4, 64, torch.float16, torch.int8),
    Case(CodeType.INT4, 32, torch.float16),
    Case(CodeType.INT4, 32, torch.float32, torch.float32),
    Case(CodeType.TABLE4, 64),
    Case(CodeType.FP8, 4096),
    Case(CodeType.FP8, 128),
)
TIMED_SHAPE = (28672, 4096)
TIMED_ROWS = (1, 16, 32, 64, 512, 2048)


def check_forms(device: str, pack: Pack | None = None) -> dict[str, Any]:
    """The forms whose products differ from their definition, and those in which an infinity in one
    row changes others. `pack`: by default the layer that is served on CUDA."""
    differing, changed = [], []
    with torch.inference_mode():
        for case, dtype, num_rows in product(CHECKED, DTYPES, CHECKED_ROWS):
            weight = make_weight(case).to(torch.device(device))
            linear = (pack or _pack())(weight, None, dtype)
            x = _random(num_rows, case.shape[1]).to(device, dtype)
            dtype_name = str(dtype).removeprefix("torch.")
            name = f"{case}, {dtype_name}, {num_rows} rows"
            clean, exact = linear(x), F.linear(x.double(), weight.dequantize().double())
            error = (clean.double() - exact).abs().max() / exact.abs().max()
            if not error <= TOLERANCE[dtype_name]:
                differing.append(f"{name}: {float(error):.1e}")
            x[-1, -1] = torch.inf
            if not torch.equal(linear(x)[:-1], clean[:-1]):
                changed.append(name)
    return {
        "ok": not differing and not changed,
        "cases": len(CHECKED) * len(DTYPES) * len(CHECKED_ROWS),
        "differing": differing,
        "rows_changed_by_others": changed,
    }


def time_forms() -> list[dict[str, Any]]:
    """Each form in bf16, and bf16 by cuBLAS, over a copy of the weight's bytes."""
    bandwidth = copy_bandwidth("cuda")
    rows = []
    with torch.inference_mode():
        for name, linear in _timed_linears():
            num_calls = min(MAX_CALLS, 1 + COLD_BYTES // linear.weight_bytes)
            linears = [linear, *(deepcopy(linear) for _ in range(num_calls - 1))]
            for num_rows in TIMED_ROWS:
                x = _random(num_rows, TIMED_SHAPE[1]).to("cuda", torch.bfloat16)
                seconds = seconds_captured(linears, [x])
                rows.append(
                    {
                        "form": name,
                        "rows": num_rows,
                        "microseconds": round(1e6 * seconds, 2),
                        "over floor": round(seconds * bandwidth / linear.weight_bytes, 2),
                    }
                )
    return rows


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second."""
    return measure_peak(
        torch.device(device),
        torch.bfloat16,
        quantization=LoadQuantization(),
        threads=torch.get_num_threads(),
    ).bytes_per_second


def _timed_linears() -> Iterator[tuple[str, Linear]]:
    yield "none", DenseLinear(_random(*TIMED_SHAPE).to("cuda", torch.bfloat16))
    for case in TIMED:
        weight = make_weight(case._replace(shape=TIMED_SHAPE)).to(torch.device("cuda"))
        yield str(case), _pack()(weight, None, torch.bfloat16)


def _pack() -> Pack:
    # Triton is not installed everywhere.
    from loraplex.kernels.wna16_linear import pack_wna16

    return pack_wna16


def _random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))
