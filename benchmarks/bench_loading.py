"""Memory and time that loading a base takes, and the engine's memory once it is ready.

    make bench-loading [ARGS="--shape 1b --bases ./a-quantized-checkpoint"]

Each row loads a base in a fresh process, for one quantization and one serving dtype. The base is a
Llama with random weights in sharded bf16 files, or with `--experts N` a Qwen3-MoE whose experts are
each a quarter of the Llama's MLP. `--bases` are others, served as they are. "peak" is the most
anonymous memory above that of the process before loading, divided by the bytes of the loaded
weights. Pages mapped from files are not in it, because the system takes them back when it needs
memory; "peak with files" is the same for all resident pages (VmHWM). The last row is a whole engine
with its default plan, when it is ready. Exits with 1 if a peak exceeds 1.15, or the engine's
resident memory 1.15 × the weights + 1 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from benchmarks.process_memory import memory_of
from benchmarks.report import MODELS, print_report
from benchmarks.timed_engine import SMOKE_SHAPE

from loraplex.adapters.identity import AdapterKey
from loraplex.api.bench.models import WEIGHT_STD, BaseShape, llama_config
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.process.adapter_fetches import FetchedBlock
from loraplex.engine.process.client import EngineClient

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = {
    "smoke": SMOKE_SHAPE,
    "120m": BaseShape(),
    "1b": BaseShape(
        hidden_size=2_048,
        intermediate_size=5_632,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        max_model_len=2_048,
    ),
}
DTYPES = ("bfloat16", "float32")
PARTS = ("loads", "engine")
MOE_SETTINGS = frozenset(
    {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "eos_token_id", "bos_token_id"),
    }
)
"""Those of a Llama that a Qwen3-MoE has too."""
MAX_PEAK = 1.15
GIB = 1 << 30
SAMPLE_SECONDS = 0.002
NUM_SHARDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    experts = options.experts
    end = f"-{experts}-experts" if experts else ""
    model, warm = (options.models / f"loading-{name}{end}" for name in (options.shape, "smoke"))
    write_base(model, SHAPES[options.shape], experts)
    write_base(warm, SMOKE_SHAPE, experts)
    config = EngineConfig(str(model), dtype=options.dtype[0], device=options.device)
    loads = [
        measure_load(replace(config, quantization=Quantization(form), dtype=dtype), warm)
        for form, dtype in itertools.product(options.quantization, options.dtype)
        if "loads" in options.parts
    ]
    loads += [
        measure_load(replace(config, model=str(base), dtype=dtype), warm)
        for base, dtype in itertools.product(options.bases, options.dtype)
    ]
    engines = [measure_engine(config)] if "engine" in options.parts else []
    tables = [(name, rows) for name, rows in (("loads", loads), ("engine", engines)) if rows]
    print_report("loading", tables[0][1], *tables[1:], shape=options.shape)
    do_fit = [row["peak"] <= MAX_PEAK for row in loads]
    do_fit += [engine["resident_gib"] <= engine["bar_gib"] for engine in engines]
    return 0 if all(do_fit) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="120m")
    parser.add_argument("--experts", type=int, default=0, help="of a Qwen3-MoE")
    forms = [str(form) for form in Quantization]
    parser.add_argument("--quantization", nargs="+", choices=forms, default=forms)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--bases", nargs="+", type=Path, default=(), help="other folders")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the base is kept")
    return parser.parse_args(arguments)


def measure_load(config: EngineConfig, warm: Path) -> dict[str, Any]:
    """One load in a fresh process, which has loaded the base `warm` before."""
    command = [sys.executable, "-P", "-m", "benchmarks.bench_loading"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LOADING": msgspec.json.encode(config).decode(),
        "LOADED_BEFORE": str(warm),
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    weights = figures["weight_bytes"]
    row: dict[str, Any] = {
        "base": Path(config.model).name,
        "quantization": str(config.quantization),
        "dtype": config.dtype,
        "weights_gib": weights / GIB,
        "peak": figures["peak_bytes"] / weights,
        "peak_with_files": figures["peak_with_files_bytes"] / weights,
        "kept": figures["kept_bytes"] / weights,
        "seconds": figures["seconds"],
    }
    if config.device != "cpu":
        row["device_peak"] = figures["device_peak_bytes"] / weights
    print(json.dumps(row), file=sys.stderr, flush=True)  # a large base takes minutes a row
    return row


def load_and_report(config: EngineConfig, warm: str) -> None:
    """In the fresh process: load a base once its imports and fixed allocations are made."""
    from loraplex.engine.model.whole_base import load_base_model

    load_base_model(replace(config, model=warm))
    on_cuda = config.device != "cpu"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    device_before = torch.cuda.memory_allocated() if on_cuda else 0
    _reset_high_water_mark()
    before = _status()
    with _sampled("RssAnon") as samples:
        begun_at = time.monotonic()
        base = load_base_model(config)
        seconds = time.monotonic() - begun_at
    after = _status()
    figures = {
        "weight_bytes": base.weight_bytes,
        "peak_bytes": max(samples) - before["RssAnon"],
        "peak_with_files_bytes": after["VmHWM"] - before["VmRSS"],
        "kept_bytes": after["VmRSS"] - before["VmRSS"],
        "device_peak_bytes": torch.cuda.max_memory_allocated() - device_before if on_cuda else 0,
        "seconds": seconds,
    }
    print(json.dumps(figures))


def measure_engine(config: EngineConfig) -> dict[str, Any]:
    """The memory of an engine process with its default plan at ready."""

    async def run() -> dict[str, Any]:
        async def no_adapters(key: AdapterKey) -> FetchedBlock:
            raise AssertionError(key)

        begun_at = time.monotonic()
        client = EngineClient(config, on_adapter_wanted=no_adapters)
        try:
            await client.start()
            assert client.pid is not None
            weights = client.info.num_parameters * getattr(torch, config.dtype).itemsize
            return {
                "dtype": config.dtype,
                "weights_gib": weights / GIB,
                "resident_gib": memory_of(client.pid).rss / GIB,
                "bar_gib": MAX_PEAK * weights / GIB + 1,
                "seconds": time.monotonic() - begun_at,
            }
        finally:
            await client.stop()

    return asyncio.run(run())


def write_base(path: Path, shape: BaseShape, num_experts: int = 0) -> None:
    """A Llama or a Qwen3-MoE with random bf16 weights in several files, unless it is there."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    index = path / "model.safetensors.index.json"
    if index.exists():
        return
    path.mkdir(parents=True, exist_ok=True)
    config = llama_config(shape)
    if num_experts:
        settings = {key: value for key, value in config.to_dict().items() if key in MOE_SETTINGS}
        settings |= {"num_experts": num_experts, "num_experts_per_tok": 2}
        settings["moe_intermediate_size"] = shape.intermediate_size // 4
        config = Qwen3MoeConfig(**settings)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        parameters = dict(_stored(model.state_dict()))
    config.save_pretrained(path)
    torch.manual_seed(shape.seed)
    weight_map: dict[str, str] = {}
    per_shard = -(-len(parameters) // NUM_SHARDS)
    for number in range(1, NUM_SHARDS + 1):
        names = list(parameters)[(number - 1) * per_shard : number * per_shard]
        file = f"model-{number:05}-of-{NUM_SHARDS:05}.safetensors"
        save_file({name: _drawn(parameters[name]) for name in names}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _stored(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As checkpoints have them: each expert's matrices by themselves."""
    for name, parameter in parameters.items():
        path, _, leaf = name.rpartition(".")
        if parameter.ndim != 3:
            yield name, parameter
            continue
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for expert, matrix in enumerate(parameter):
            for part, rows in zip(leaves, matrix.chunk(len(leaves)), strict=True):
                yield f"{path}.{expert}.{part}.weight", rows


def _drawn(like: Tensor) -> Tensor:
    drawn = torch.randn(like.shape) * WEIGHT_STD if like.ndim > 1 else torch.ones(like.shape)
    return drawn.to(torch.bfloat16)


def _status() -> dict[str, int]:
    """The memory fields of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) << 10 for name, value in pairs if value.endswith("kB")}


def _reset_high_water_mark() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def _sampled(field: str) -> Iterator[list[int]]:
    """Samples of a field of `_status` while the block runs, at least one."""
    samples: list[int] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            samples.append(_status()[field])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
        samples.append(_status()[field])


if __name__ == "__main__":
    if "LOADING" in os.environ:
        config = msgspec.json.decode(os.environ["LOADING"], type=EngineConfig)
        load_and_report(config, os.environ["LOADED_BEFORE"])
    else:
        sys.exit(main())
