"""Profiles decode steps: where their time goes, by kind of work."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import DeviceType

from ..adapters.identity import AdapterKey
from ..adapters.tier import Tier
from ..kernels.decoder_layer_cpu import LayerWork
from ..kernels.lora import LoraProjection
from . import next_tokens
from .core import EngineCore
from .execution import runner
from .execution.sampler import sample_tokens
from .messages import (
    Abort,
    AdapterFetched,
    AdapterWanted,
    GenerationRequest,
    StepEvents,
    Submit,
)
from .model import experts
from .model.decoder_layers import measured_layers
from .model.forward import PagedForward
from .sampling_params import SamplingParams

TENANT = "profile"
NUM_WARM_TOKENS = 3
"""Of each sequence, before steps are profiled."""


class ProfileFailed(Exception):
    """A request of the profile ended."""


class Work(StrEnum):
    """The kinds of work in a step."""

    PRODUCTS = "products"
    """With the base's weights."""
    LORA = "LoRA"
    ATTENTION = "attention"
    """With writing and reading the KV cache."""
    LAYERS = "norms, rope, activations"
    """Everything else in the model."""
    SAMPLING = "sampling"
    HOST = "host"
    """Scheduling, building inputs, processing output; not listed on CUDA, where it overlaps."""
    WAITING = "waiting"
    """Of a CUDA device for the host."""


@dataclass(frozen=True)
class DecodeLoad:
    """Sequences that decode together."""

    num_sequences: int
    context: int
    """Tokens of each prompt, at random."""
    adapters: Mapping[AdapterKey, Path]
    """Their blocks. Sequences use them in turn; without any, they use the base."""


@dataclass(frozen=True)
class StepProfile:
    """Means over the profiled steps."""

    milliseconds: Mapping[Work, float]
    """Per step. They add up to the step."""

    @property
    def step_milliseconds(self) -> float:
        return sum(self.milliseconds.values())


def profile_decode(core: EngineCore, load: DecodeLoad, num_steps: int) -> StepProfile:
    """Run an idle engine with this load until each sequence decodes, then profile steps.

    Raises ProfileFailed if a request fails.
    """
    driver = _Driver(core, load)
    driver.run_until_all_decode()
    is_cuda = core.parts.base.device.type == "cuda"
    seconds = (_kernel_seconds if is_cuda else _call_seconds)(core, driver.step, num_steps)
    driver.finish()
    return StepProfile({work: 1e3 * seconds[work] / num_steps for work in Work if work in seconds})


class _Driver:
    """Submits the load, and answers the engine's requests for adapters."""

    def __init__(self, core: EngineCore, load: DecodeLoad) -> None:
        self._core = core
        self._blocks = load.adapters
        self._num_tokens: dict[str, int] = {}
        """Generated so far, by request."""
        keys: Sequence[AdapterKey | None] = [*load.adapters] or [None]
        # None ends by itself: they are ended together.
        sampling = SamplingParams(
            max_tokens=core.info.max_model_len - load.context, temperature=0.0, ignore_eos=True
        )
        drawn = random.Random(0)
        for index in range(load.num_sequences):
            prompt = drawn.choices(range(core.parts.base.vocab_size), k=load.context)
            request_id, key = f"profile-{index}", keys[index % len(keys)]
            self._num_tokens[request_id] = 0
            core.handle(Submit(GenerationRequest(request_id, TENANT, prompt, sampling, key)))

    def run_until_all_decode(self) -> None:
        while min(self._num_tokens.values()) < NUM_WARM_TOKENS:
            self.step()

    def step(self) -> None:
        for message in self._core.step():
            match message:
                case AdapterWanted(key):
                    self._core.handle(AdapterFetched(key, (str(self._blocks[key]),), Tier.STORE))
                case StepEvents():
                    self._count(message)

    def finish(self) -> None:
        """End the requests."""
        for request_id in self._num_tokens:
            self._core.handle(Abort(request_id))
        while self._core.has_work:
            self._core.step()

    def _count(self, events: StepEvents) -> None:
        for generated in events.tokens:
            self._num_tokens[generated.request_id] += len(generated.token_ids)
        for finished in events.finished:
            raise ProfileFailed(finished.error.message if finished.error else finished.reason)


# --- on the CPU: calls ----------------------------------------------------------------------------


class _Stopwatch:
    """Gives each moment to the innermost work that has begun."""

    def __init__(self) -> None:
        self.seconds = defaultdict[Work, float](float)
        self._begun: list[Work] = []
        self._since = 0.0

    @contextmanager
    def timing(self, work: Work) -> Iterator[None]:
        self._give()
        self._begun.append(work)
        try:
            yield
        finally:
            self._give()
            self._begun.pop()

    def _give(self) -> None:
        now = time.perf_counter()
        if self._begun:
            self.seconds[self._begun[-1]] += now - self._since
        self._since = now


def _call_seconds(core: EngineCore, step: Callable[[], None], num_steps: int) -> dict[Work, float]:
    """The time of all these steps by work: of the calls in which it is done."""
    stopwatch = _Stopwatch()
    with _timed(stopwatch, _calls(core)), measured_layers() as within_layers:
        for _ in range(num_steps):
            with stopwatch.timing(Work.HOST):
                step()
    seconds = stopwatch.seconds
    for kind, work in _WITHIN_LAYERS.items():
        if own := within_layers[kind]:
            seconds[work] += own
            seconds[Work.LAYERS] -= own
    return seconds


_WITHIN_LAYERS = {
    LayerWork.PRODUCTS: Work.PRODUCTS,
    LayerWork.LORA: Work.LORA,
    LayerWork.ATTENTION: Work.ATTENTION,
}
"""Of layers that are one call, which count as `Work.LAYERS` first."""


def _calls(core: EngineCore) -> Iterator[tuple[Any, str, Work]]:
    """Where each work is done: an object or class, and the name of its function."""
    linears = {type(linear) for linear in core.parts.base.linears}
    yield from ((linear, "forward", Work.PRODUCTS) for linear in {nn.Linear, *linears})
    yield experts, "grouped_linear", Work.PRODUCTS
    yield experts, "add_experts", Work.LORA
    yield LoraProjection, "begin", Work.LORA
    yield LoraProjection, "add", Work.LORA
    yield PagedForward, "attend", Work.ATTENTION
    yield runner, "run_model", Work.LAYERS
    yield next_tokens, "sample_tokens", Work.SAMPLING


@contextmanager
def _timed(stopwatch: _Stopwatch, calls: Iterable[tuple[Any, str, Work]]) -> Iterator[None]:
    """Time these functions while the context lasts."""
    with ExitStack() as stack:
        for owner, name, work in calls:
            function = stopwatch.timing(work)(getattr(owner, name))
            stack.enter_context(_replaced(owner, name, function))
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


# --- on CUDA: kernels -----------------------------------------------------------------------------

_KERNELS = {
    **dict.fromkeys(("shrink_kernel", "expand_kernel"), Work.LORA),
    **dict.fromkeys(("attend_kernel", "combine_kernel", "write_kernel"), Work.ATTENTION),
    **dict.fromkeys(("wna16_kernel", "sum_kernel", "dequantize_kernel"), Work.PRODUCTS),
}
"""Ours, by name."""
_PRODUCTS = ("gemm", "gemv", "cutlass", "nvjet")
"""Parts of the names of the libraries' kernels."""


def _kernel_seconds(
    core: EngineCore, step: Callable[[], None], num_steps: int
) -> dict[Work, float]:
    """The device's time of all these steps by work: of its kernels, in graphs as well."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    sampling = torch.profiler.record_function(Work.SAMPLING)
    with (
        _replaced(next_tokens, "sample_tokens", sampling(sample_tokens)),
        torch.profiler.profile(activities=activities) as profiled,
    ):
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
    kernels = [
        Kernel(event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profiled.events() or ()
        if event.device_type is DeviceType.CUDA
    ]
    seconds = kernel_seconds(kernels)
    seconds[Work.WAITING] = elapsed - sum(seconds.values())
    return seconds


class Kernel(NamedTuple):
    """What ran on the device from `start` to `end`, in seconds."""

    name: str
    start: float
    end: float


def kernel_seconds(kernels: Sequence[Kernel]) -> dict[Work, float]:
    """The time by work. Each moment counts once, for the kernel that began first.

    The profiler lists the device's side of a recorded function as one more kernel, which spans its
    own: those of sampling have names that the model's have too.
    """
    spans = [kernel for kernel in kernels if kernel.name == Work.SAMPLING]
    seconds = defaultdict[Work, float](float)
    end = 0.0
    for kernel in sorted(set(kernels) - set(spans), key=attrgetter("start")):
        is_sampling = any(span.start <= kernel.start < span.end for span in spans)
        work = Work.SAMPLING if is_sampling else _work_of(kernel.name)
        seconds[work] += max(kernel.end - max(kernel.start, end), 0.0)
        end = max(end, kernel.end)
    return seconds


def _work_of(kernel: str) -> Work:
    if any(part in kernel for part in _PRODUCTS):
        return Work.PRODUCTS
    return _KERNELS.get(kernel, Work.LAYERS)
