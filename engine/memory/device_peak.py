"""Measures the device's peak bandwidth and compute once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from ...kernels.linear_packing import pack_linear
from ..model.load_quantization import LoadQuantization
from .utilization import DevicePeak

SECONDS_EACH = 0.05
"""The duration of each of the two measurements, without its first call."""
COPY_BYTES = 32 << 20
"""With as much for the copy: more than the caches of a few cores."""


@cache
def measure_peak(
    device: torch.device, dtype: torch.dtype, *, quantization: LoadQuantization, threads: int
) -> DevicePeak:
    """The best of a few copies, and of a few products by the layers that the engine would use.

    `threads` are those that torch runs now: another number is another measurement.
    """
    with torch.inference_mode():
        peak = DevicePeak(_copy_rate(device), _matmul_rate(device, dtype, quantization))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # so that later queries of free memory are correct
    return peak


def _copy_rate(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * COPY_BYTES / _least_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype, quantization: LoadQuantization) -> float:
    """FLOP per second of a layer that is not excluded."""
    num_rows, size = (256, 1024) if device.type == "cpu" else (4096, 4096)
    generator = torch.Generator(device).manual_seed(0)  # does not change the global generator
    weight = torch.empty(size, size, dtype=dtype, device=device).normal_(generator=generator)
    layer = pack_linear(quantization.apply("layer", weight), dtype=dtype)
    x = weight.new_empty(num_rows, size).normal_(generator=generator)
    return 2 * num_rows * size * size / _least_seconds(lambda: layer(x), device)


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    seconds: list[float] = []
    _timed(call, device)
    start = time.perf_counter()
    while not seconds or time.perf_counter() - start < SECONDS_EACH:
        seconds.append(_timed(call, device))
    return min(seconds)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
