"""The cost of the LoRA op relative to the base's matmuls, over all projections of a Llama.

    python -m benchmarks.bench_lora [--device cuda] [--shape 1b] [--json FILE]

Each layer has its own weights, so no weights stay in a cache that would not stay there in serving.
Needs torch and numpy, and triton on CUDA.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.adapters.arena import Arena
from loraplex.adapters.block import BlockPlan
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, Projection, Slice
from loraplex.kernels.linear import Linear
from loraplex.kernels.linear_packing import pack_linear
from loraplex.kernels.lora import LoraProjection
from loraplex.kernels.lora_batch import AdapterRun, LoraBatch, LoraBatchBuilder
from loraplex.kernels.lora_reference import add_lora_reference

POPULARITIES = ("identical", "uniform", "zipf", "distinct")
NUM_ADAPTERS = 8
RANK = 16
NUM_TOKENS = {"decode": 16, "verify": 80, "prefill": 512}
MIN_REPEATS, MAX_REPEATS = 3, 30
MAX_MS = 1000.0
"""Of one timing, unless the fewest repeats take longer."""


@dataclass(frozen=True)
class Shape:
    """The linear layers of a Llama."""

    name: str
    num_layers: int
    hidden: int
    key_value: int
    intermediate: int

    def projections(self) -> list[tuple[int, tuple[int, ...]]]:
        """(in_features, out_features of each slice) of one layer's projections."""
        return [
            (self.hidden, (self.hidden, self.key_value, self.key_value)),
            (self.hidden, (self.hidden,)),
            (self.hidden, (self.intermediate, self.intermediate)),
            (self.intermediate, (self.hidden,)),
        ]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 4, 256, 128, 704),
        Shape("120m", 12, 768, 256, 2048),
        Shape("1b", 22, 2048, 256, 5632),
        Shape("8b", 32, 4096, 1024, 14336),
    )
}


@dataclass(frozen=True)
class Case:
    """One step and a way to run it."""

    phase: str
    """`decode`, `verify` (of draft tokens, five a sequence) or `prefill`."""
    popularity: str
    rows: tuple[int, ...]
    """Each token's adapter."""
    way: str
    """`library`, `segments` (CPU), `triton` (CUDA) or `reference`."""


@dataclass(frozen=True)
class Timing:
    """What the LoRA op of one step took, over all layers."""

    phase: str
    popularity: str
    way: str
    num_tokens: int
    num_adapters: int
    """Distinct adapters in the step."""
    milliseconds: float
    ratio: float
    """The base's linears and LoRA together over the base's alone."""


class Model:
    """Base linears and resident adapters of one shape; one call is one step over all layers."""

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.projections = shape.projections() * shape.num_layers
        layout = _layout(self.projections)
        plan = BlockPlan(layout, dict.fromkeys(range(len(layout.slices)), RANK))
        adapter_bytes = (plan.num_elements + 32) * dtype.itemsize
        self.arena = Arena(layout, NUM_ADAPTERS * adapter_bytes, dtype, device)
        self.generations = [self._add_adapter(plan, index) for index in range(NUM_ADAPTERS)]
        self.builder = LoraBatchBuilder(self.arena, device)
        self.slice_ranges = [indices for _, indices in layout.projection_ranges()]
        self.lora = [
            LoraProjection(indices.start, in_features, outs)
            for (in_features, outs), indices in zip(
                self.projections, self.slice_ranges, strict=True
            )
        ]
        self.linears = [self._linear(*projection) for projection in self.projections]

    def batch(self, rows: Sequence[int], *, num_decodes: int, in_segments: bool) -> LoraBatch:
        """A step of one token per row entry; `in_segments`: none of it is the CPU library's."""
        runs = [AdapterRun(1, row, self.generations[row]) for row in rows]
        batch = self.builder.build(runs, num_decodes=num_decodes)
        assert batch is not None
        if in_segments:  # every adapter changes the first slice
            segments = self.builder.segments_touching(0, runs)
            return replace(batch, segments=segments)
        return batch

    def run_base(self, inputs: dict[int, Tensor]) -> None:
        for (in_features, _), linear in zip(self.projections, self.linears, strict=True):
            linear(inputs[in_features])

    def run_lora(
        self, inputs: dict[int, Tensor], outputs: dict[int, Tensor], batch: LoraBatch
    ) -> None:
        for (in_features, outs), lora in zip(self.projections, self.lora, strict=True):
            lora.add(inputs[in_features], outputs[sum(outs)], self.arena, batch)

    def run_reference(
        self, inputs: dict[int, Tensor], outputs: dict[int, Tensor], batch: LoraBatch
    ) -> None:
        for (in_features, outs), indices in zip(self.projections, self.slice_ranges, strict=True):
            add_lora_reference(
                inputs[in_features],
                outputs[sum(outs)],
                self.arena.flat,
                self.arena.table[:, indices.start : indices.stop],
                batch.token_rows,
                slice_outs=outs,
            )

    def inputs(self, num_tokens: int) -> dict[int, Tensor]:
        """By in_features: `[num_tokens, in_features]`."""
        sizes = {in_features for in_features, _ in self.projections}
        return {size: self._random(num_tokens, size) for size in sizes}

    def outputs(self, num_tokens: int) -> dict[int, Tensor]:
        """By out_features of the projection: `[num_tokens, out_features]`."""
        sizes = {sum(outs) for _, outs in self.projections}
        return {size: self._random(num_tokens, size) for size in sizes}

    def _add_adapter(self, plan: BlockPlan, index: int) -> int:
        key = AdapterKey("bench", f"sha256:{index:064x}")
        placement = self.arena.place(key, plan.num_elements, plan.table)
        assert placement is not None
        assert placement.row == index
        extent = placement.extent
        self.arena.flat[extent.offset : extent.end].normal_(std=0.02)
        self.arena.publish(placement)
        return placement.generation

    def _linear(self, in_features: int, outs: tuple[int, ...]) -> Linear:
        return pack_linear(self._random(sum(outs), in_features))

    def _random(self, *sizes: int) -> Tensor:
        return torch.empty(*sizes, dtype=self.dtype, device=self.device).normal_(std=0.02)


def time_kernels(device: str, *, shape: str = "120m") -> dict[str, Any]:
    """Time steps of each phase on this device; the result is plain JSON data.

    `{"device", "shape", "dtype", "base_milliseconds": {phase: ms}, "timings": [...]}`: see Timing.
    """
    torch_device = torch.device(device)
    dtype = _serving_dtype(torch_device)
    with torch.inference_mode():
        model = Model(SHAPES[shape], device=torch_device, dtype=dtype)
        base = {phase: time_base(model, count) for phase, count in NUM_TOKENS.items()}
        timings = [time_case(model, case, base[case.phase]) for case in cases(torch_device)]
    return {
        "device": _device_name(torch_device),
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "base_milliseconds": base,
        "timings": [asdict(timing) for timing in timings],
    }


def cases(device: torch.device) -> Iterator[Case]:
    """Every step and way that makes sense on this device."""
    is_cuda = device.type == "cuda"
    ways = {
        "decode": ("triton",) if is_cuda else ("library", "segments", "reference"),
        "verify": ("triton",) if is_cuda else ("library", "segments"),
        "prefill": ("triton",) if is_cuda else ("library", "segments"),
    }
    for phase, num_tokens in NUM_TOKENS.items():
        for popularity in POPULARITIES:
            rows = draw_rows(popularity, num_tokens)
            for way in ways[phase]:
                yield Case(phase, popularity, rows, way)


def draw_rows(popularity: str, num_tokens: int) -> tuple[int, ...]:
    """The adapter of each token, tokens of an adapter together."""
    weights = {
        "identical": [1.0] + [0.0] * (NUM_ADAPTERS - 1),
        "uniform": [1.0] * NUM_ADAPTERS,
        "zipf": [1 / (rank + 1) ** 1.5 for rank in range(NUM_ADAPTERS)],
    }
    if popularity == "distinct":
        return tuple(sorted(index % NUM_ADAPTERS for index in range(num_tokens)))
    rng = random.Random(popularity)
    return tuple(sorted(rng.choices(range(NUM_ADAPTERS), weights[popularity], k=num_tokens)))


def time_base(model: Model, num_tokens: int) -> float:
    """Milliseconds of the base's linears alone."""
    inputs = model.inputs(num_tokens)
    return _milliseconds(lambda: model.run_base(inputs), model.device)


def time_case(model: Model, case: Case, base_milliseconds: float) -> Timing:
    num_tokens = len(case.rows)
    num_decodes = 0 if case.phase == "prefill" else num_tokens
    is_segmented = case.way == "segments"
    batch = model.batch(case.rows, num_decodes=num_decodes, in_segments=is_segmented)
    inputs, outputs = model.inputs(num_tokens), model.outputs(num_tokens)
    run = model.run_reference if case.way == "reference" else model.run_lora
    milliseconds = _milliseconds(lambda: run(inputs, outputs, batch), model.device)
    return Timing(
        phase=case.phase,
        popularity=case.popularity,
        way=case.way,
        num_tokens=num_tokens,
        num_adapters=len(set(case.rows)),
        milliseconds=milliseconds,
        ratio=1 + milliseconds / base_milliseconds,
    )


def _milliseconds(step: Callable[[], None], device: torch.device) -> float:
    """Median over repetitions of a warm step."""
    step()
    samples: list[float] = []
    while len(samples) < MIN_REPEATS or (sum(samples) < MAX_MS and len(samples) < MAX_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        step()
        _synchronize(device)
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _serving_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device multiplies it, else fp32."""
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _layout(projections: Sequence[tuple[int, tuple[int, ...]]]) -> BaseLayout:
    return BaseLayout(
        base_id="bench",
        projections=tuple(
            Projection(tuple(Slice(f"{i}.{j}", in_features, out) for j, out in enumerate(outs)))
            for i, (in_features, outs) in enumerate(projections)
        ),
    )


def print_table(result: dict[str, Any]) -> None:
    """The result of `time_kernels` for people."""
    print(f"{result['shape']}, {result['dtype']}, {result['device']}")
    for phase, milliseconds in result["base_milliseconds"].items():
        print(f"base linears, {phase} of {NUM_TOKENS[phase]} tokens: {milliseconds:.2f} ms")
    print(f"{'phase':8} {'popularity':10} {'adapters':>8} {'way':10} {'LoRA ms':>8} {'ratio':>6}")
    for timing in result["timings"]:
        print(
            f"{timing['phase']:8} {timing['popularity']:10} {timing['num_adapters']:8} "
            f"{timing['way']:10} {timing['milliseconds']:8.2f} {timing['ratio']:6.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="120m", choices=SHAPES)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    options = parser.parse_args(arguments)
    result = time_kernels(options.device, shape=options.shape)
    print_table(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
