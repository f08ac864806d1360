"""Chooses the share of a core that adapter loading may use beside the steps of this device.

On the CPU a step runs on all cores, and each of its threads waits for the slowest: a loader thread
takes its time from every step. On a GPU a step takes one core, which launches it. What loading
costs it there depends on the host's other cores and its memory, so it is measured.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...adapters.block_reader import PIECE_ELEMENTS

MIN_DUTY = 0.1
MAX_SLOWDOWN = 0.05
"""The part by which loading may prolong a step on average, of the 0.1 that its p99 may rise."""
NUM_ROUNDS = 8
ROUND_SECONDS = 0.02
_STEP_LAUNCHES = 200
_SIZE = 1024


def choose_duty(device: torch.device) -> float:
    """Seconds of CPU time per second for all loader threads together, while steps run."""
    if device.type == "cpu":
        return MIN_DUTY
    return duty_for(measure_slowdown(device))


def duty_for(slowdown: float) -> float:
    """The duty that prolongs steps by MAX_SLOWDOWN, if an unpaced loader thread prolongs them by
    `slowdown`; at least MIN_DUTY, at most a whole core."""
    return max(MIN_DUTY, min(1.0, MAX_SLOWDOWN / max(slowdown, MAX_SLOWDOWN)))


def measure_slowdown(device: torch.device) -> float:
    """By which part of its time a loader thread prolongs work that is launched like a step's.

    Rounds with the thread and without it alternate, so that another load of the machine meets both.
    """
    generator = torch.Generator(device).manual_seed(0)  # does not change the global generator
    weight = torch.empty(_SIZE, _SIZE, device=device, dtype=torch.float32)
    weight.normal_(generator=generator)
    rows = weight[:8].clone()
    alone, beside = [], []
    _step_seconds(rows, weight)  # warm
    for _ in range(NUM_ROUNDS):
        alone.append(_step_seconds(rows, weight))
        with _loading(device):
            beside.append(_step_seconds(rows, weight))
    return max(0.0, statistics.median(beside) / statistics.median(alone) - 1)


def _step_seconds(rows: Tensor, weight: Tensor) -> float:
    """The median time of a step of many small products, over a round."""
    seconds: list[float] = []
    until = time.perf_counter() + ROUND_SECONDS
    while not seconds or time.perf_counter() < until:
        begun_at = time.perf_counter()
        for _ in range(_STEP_LAUNCHES if rows.is_cuda else 1):
            result = rows @ weight
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        seconds.append(time.perf_counter() - begun_at)
    return statistics.median(seconds)


@contextmanager
def _loading(device: torch.device) -> Iterator[None]:
    """A thread that reads, scales, checks and copies pieces without pause."""
    is_over = threading.Event()
    copy = _piece_copy(device)

    def load() -> None:
        stored = torch.ones(PIECE_ELEMENTS, dtype=torch.bfloat16)
        while not is_over.is_set():
            scaled = stored.float().mul_(0.5)
            assert scaled.isfinite().all()
            copy(scaled)

    thread = threading.Thread(target=load, name="loader-measurement", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _piece_copy(device: torch.device) -> Callable[[Tensor], object]:
    """Copies a piece into host memory and from there to the device, as a load does."""
    host = torch.empty(PIECE_ELEMENTS, pin_memory=device.type == "cuda", dtype=torch.float32)
    if device.type != "cuda":
        return host.copy_
    target = torch.empty(PIECE_ELEMENTS, device=device, dtype=torch.float32)
    stream = torch.cuda.Stream(device)

    def copy(piece: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(host.copy_(piece), non_blocking=True)
        stream.synchronize()

    return copy
