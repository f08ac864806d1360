"""Checks a GPU: correct tokens through the real engine with paging, and timings of kernels.

    make gpu-check

Needs torch, triton, transformers, peft, accelerate, safetensors, numpy and msgspec.

Serves the same requests, with the base and adapters of mixed ranks in mixed batches, on the CPU and
on the device under test, from an arena that holds a third of the adapters. Greedy tokens must be
equal. Where they diverge, the top two logits must be nearly equal (then the position is counted as
a near-tie). They are served again while the border between KV cache and arena moves. Each supported
PEFT feature must equal PEFT on the CPU. Attention must equal the reference on the CPU, fused norms,
rotary embeddings and activations must equal the plain ops, and a quantized base must match its
dequantized weights, as must a product with a quantized weight of every form. Adapters' vectors must
change a result as plain PyTorch does, and the kernels of MoE layers must compute what each expert's
matrices say. Recurrences must equal their definition. A row's LoRA and its experts must give the
same bits whatever shares its step. A group of one rank must answer as the engine without a group,
with NCCL's exchanges in the captured steps, and so must two ranks if there are two devices. A
confined trainer must have the losses of one on the CPU, and end above its limit on the device's
memory. Engines with proposers must answer like the one without, models with states like
transformers on the CPU, and each acceptance rule must sample the model's distribution. It measures
the kernels, quantized layers, other requests' inter-token latency while a large adapter is loaded,
and an 8 B base with random weights: its decode steps in bf16, int8 and int4, how long the device
waits in them, its prompts, and its decoding with draft tokens. Each part is reported on stderr when
it ends, as a line of JSON; stdout gets all parts as one object, with the figures for which there is
a bar in `bars`. `--parts` selects parts. Exits with 1 if a check fails, whatever the bars say, and
with 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.attention_check import check_attention, time_attention
from benchmarks.bench_lora import time_kernels
from benchmarks.drawn_base import LARGE_SHAPE
from benchmarks.expert_check import check_experts, time_experts
from benchmarks.fused_layers_check import check_fused_layers, time_fused_layers
from benchmarks.gpu_bars import bars
from benchmarks.idle_check import check_idle
from benchmarks.lora_check import check_rows, check_vectors
from benchmarks.packed_experts_check import check_packed_experts, time_packed_experts
from benchmarks.quantization_check import check_quantization, time_quantization
from benchmarks.quantized_forms_check import check_forms, time_forms
from benchmarks.rank_check import check_ranks, time_ranks
from benchmarks.recurrence_check import check_recurrences, time_recurrences
from benchmarks.speculation_check import check_speculation
from benchmarks.states_check import check_states
from benchmarks.timed_engine import make_model
from benchmarks.trainer_check import check_trainer

from benchmarks import bench_adapter_load, bench_mixed_step, bench_prompts, bench_speculation
from loraplex.adapters.formats import SERVED
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import Quantization
from support.borders import swing
from support.engine import LocalEngine
from support.families import EXPERTS, save_family
from support.feature_proofs import open_feature_proofs
from support.greedy import parts_at_near_tie
from support.models import make_adapter, make_tiny_llama

NEAR_TIE = 1e-3
"""Logit gap, fp32, that different summation orders on two devices may cross."""
FEATURE_TOLERANCE = 1e-3
"""Of a logit, fp32 on the device against PEFT on the CPU."""
MAX_LATENCY_RATIO = 1.1
RANKS = (1, 4, 8, 13, 16, 32, 64, 4, 8, 16, 32, 7)
DORA_EACH = 4
"""One adapter in so many uses DoRA."""
LONGEST_PROMPTS = (120, 120, 120, 400)
"""Of one request in four, so that some steps are too large for a graph."""
MOVING_BYTES = 512 << 20
"""Of an engine whose border moves, the base included."""
LLAMA_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
EXPERTS_SHAPE: dict[str, Any] = {
    **{**EXPERTS, "num_experts": 8, "moe_intermediate_size": 192},
    **{"vocab_size": 256, "hidden_size": 256, "shared_expert_intermediate_size": 192},
    **{"num_hidden_layers": 4, "initializer_range": 0.05, "max_position_embeddings": 2048},
}
EXPERTS_TARGETS: tuple[dict[str, list[str]], ...] = (
    {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []},
    {"target_parameters": ["gate.weight"], "target_modules": ["o_proj"]},
    {"target_modules": ["q_proj", "v_proj"]},
)
"""Of one adapter after another."""


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    adapter: int | None
    """Index of the adapter; None is the base."""
    max_tokens: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--no-timing", action="store_true", help="only check correctness")
    parser.add_argument("--no-features", action="store_true", help="leave out the PEFT features")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write('{"error": "no CUDA device here: unmeasured"}\n')
        return 2
    result: dict[str, Any] = {"device": device_name(arguments.device), "torch": torch.__version__}
    for name in arguments.parts or parts_on(arguments):
        with tempfile.TemporaryDirectory() as directory:
            result[name] = PARTS[name](Path(directory), arguments)
        sys.stderr.write(json.dumps({name: result[name]}) + "\n")
    result["bars"] = bars(result)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if all(result[name]["ok"] for name in CHECKS if name in result) else 1


def parts_on(arguments: argparse.Namespace) -> list[str]:
    """What there is to run on this device, without what was left out."""
    left_out = {"features"} if arguments.no_features else set()
    if arguments.device != "cuda":
        left_out |= set(CUDA_PARTS)
    if arguments.no_timing:
        left_out |= set(PARTS) - set(CHECKS)
    return [name for name in PARTS if name not in left_out]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def check_serving(
    directory: Path, *, device: str, num_requests: int, moves_border: bool = False
) -> dict[str, Any]:
    """Serve the same cases on the CPU and on `device`; compare the tokens.

    `moves_border`: see `compare_serving`. On CUDA steps of few tokens replay captured graphs, with
    more adapters, higher ranks and DoRA as they come; steps with more of them run kernel by kernel.
    """
    base = make_tiny_llama(directory / "base", **LLAMA_SHAPE)
    folders = [
        make_adapter(
            base,
            directory / f"adapter-{index}",
            seed=index,
            scale=0.05,
            r=rank,
            use_dora=index % DORA_EACH == 0,
        )
        for index, rank in enumerate(RANKS)
    ]
    return compare_serving(
        base,
        folders,
        directory,
        device=device,
        num_requests=num_requests,
        arena_bytes=24 << 20,
        moves_border=moves_border,
    )


def check_serving_experts(directory: Path, *, device: str, num_requests: int) -> dict[str, Any]:
    """Like `check_serving`, of a Qwen2-MoE with adapters of its experts, routers and linear
    layers."""
    base = save_family(directory / "base", "qwen2_moe", EXPERTS_SHAPE)
    folders = [
        make_adapter(
            base,
            directory / f"adapter-{index}",
            seed=index,
            scale=0.05,
            r=rank,
            **EXPERTS_TARGETS[index % len(EXPERTS_TARGETS)],
        )
        for index, rank in enumerate(RANKS)
    ]
    return compare_serving(
        base, folders, directory, device=device, num_requests=num_requests, arena_bytes=10 << 20
    )


def compare_serving(
    base: Path,
    folders: Sequence[Path],
    directory: Path,
    *,
    device: str,
    num_requests: int,
    arena_bytes: int,
    moves_border: bool = False,
) -> dict[str, Any]:
    """The tokens of random requests on the CPU and on `device`, and what served them.

    `arena_bytes`: not enough for all adapters. `moves_border`: on `device` the border between KV
    cache and arena moves at every chance, and with it blocks of running requests.
    """
    cases = make_cases(num_requests)
    reference = make_engine(base, directory, "cpu", arena_bytes)
    tested = make_engine(base, directory, device, None if moves_border else arena_bytes)
    border = swing(tested) if moves_border else None
    keys = [reference.add_adapter(folder) for folder in folders]
    for folder in folders:
        tested.add_adapter(folder)
    expected, _ = serve(reference, cases, keys)
    actual, seconds = serve(tested, cases, keys)
    differing = [
        index for index, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1]
    ]
    near_ties = [
        index
        for index in differing
        if parts_at_near_tie(
            reference,
            cases[index].prompt,
            adapter_of(cases[index], keys),
            expected=expected[index],
            actual=actual[index],
            gap=NEAR_TIE,
        )
    ]
    stats = tested.core.stats()
    num_usable = tested.core.parts.kv.num_usable(0)
    num_tokens = sum(map(len, actual))
    num_moved = sum(group.num_moved for group in tested.core.parts.kv.groups)
    reference.close()
    tested.close()
    return {
        "ok": differing == near_ties
        and stats.num_adapter_evictions > 0
        and (not border or (border.num_moves > 0 and (num_moved > 0) == (device == "cuda")))
        and (0 < stats.num_graph_steps < stats.num_steps) == (device == "cuda"),
        "requests": len(cases),
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds, 1),
        "different_beyond_near_ties": len(differing) - len(near_ties),
        "near_ties": len(near_ties),
        "steps": stats.num_steps,
        "steps_replayed_from_graphs": stats.num_graph_steps,
        "decode_steps_without_graph": stats.num_eager_decodes,
        "memory_plan": tested.core.info.memory_plan,
        "border_moves": stats.num_border_moves,
        "moved_blocks": num_moved,
        "adapter_loads": stats.num_adapter_loads,
        "adapter_evictions": stats.num_adapter_evictions,
        "leaked_blocks": num_usable - stats.num_free_kv_blocks,
    }


def check_features(device: str) -> dict[str, Any]:
    """The largest error of each served PEFT feature's logits."""
    with open_feature_proofs(device) as proofs:
        errors = {feature.name: proofs.prove(feature).max_error for feature in SERVED}
    is_ok = all(error is not None and error <= FEATURE_TOLERANCE for error in errors.values())
    return {"ok": is_ok, "max_error": errors}


def time_adapter_load(device: str) -> dict[str, Any]:
    """Others' p99 gap while 500 MB come from a slow store, over the same without; bar 1.1."""
    plan = replace(bench_adapter_load.Plan(), num_pairs=5)  # a limited time on the device
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), plan.shape)
        size_bytes, loading, quiet = bench_adapter_load.measure(
            model, plan, Path(directory), device=device
        )
    ratio = bench_adapter_load.p99_ratio(loading, quiet)
    return {"size_bytes": size_bytes, "p99_ratio": ratio, "ok": ratio <= MAX_LATENCY_RATIO}


def time_mixed_step(device: str, quantization: Quantization) -> dict[str, Any]:
    """Decode steps of an 8 B Llama: base, one adapter, an adapter a sequence, one of them with
    lm_head, and that one with DoRA.

    Each arm's step over the base's, over the ratio of their bytes; bar 1.08. The last arm's step
    over that of an adapter a sequence, in the largest batch; bar 1.1.
    """
    plan = bench_mixed_step.Plan(
        LARGE_SHAPE,
        "bfloat16",
        quantization,
        batches=(1, 32),
        num_output_tokens=24,
        num_runs=2,
    )
    with tempfile.TemporaryDirectory() as directory:
        rows, facts = bench_mixed_step.compare(
            plan, Path(directory), Path(directory), device=device
        )
    return {"rows": rows, **facts}


def time_prompts(directory: Path, device: str) -> dict[str, Any]:
    """Steps of an 8 B Llama that compute prompts, beside the least that its products take."""
    plan = bench_prompts.Plan(LARGE_SHAPE, "bfloat16", bench_prompts.LARGE)
    rows, facts = bench_prompts.compare(plan, directory, directory, device=device)
    return {"rows": rows, **facts}


def time_speculation(directory: Path, device: str) -> dict[str, Any]:
    """Decoding with draft tokens over plain decoding, and what checking draft tokens costs."""
    figures, costs = bench_speculation.run(bench_speculation.CUDA, directory, device)
    races = [race for figure in figures for race in figure.races]
    return {
        "rows": [figure.row for figure in figures],
        "cost_of_checking": costs,
        "requests_answered_differently": sum(race.num_different for race in races),
    }


def make_cases(count: int) -> list[Case]:
    rng = random.Random(0)
    return [
        Case(
            prompt=[rng.randrange(256) for _ in range(rng.randint(1, rng.choice(LONGEST_PROMPTS)))],
            adapter=rng.choice([None, *range(len(RANKS))]),
            max_tokens=rng.randint(4, 24),
        )
        for _ in range(count)
    ]


def adapter_of(case: Case, keys: Sequence[AdapterKey]) -> AdapterKey | None:
    return None if case.adapter is None else keys[case.adapter]


def make_engine(base: Path, directory: Path, device: str, arena_bytes: int | None) -> LocalEngine:
    """fp32, chunked prefill. `arena_bytes` None: the border between arena and KV cache moves."""
    is_fixed = arena_bytes is not None
    return LocalEngine(
        base,
        directory,
        device=device,
        dtype="float32",
        kv_cache_bytes=256 << 20 if is_fixed else None,
        arena_bytes=arena_bytes,
        memory_bytes=None if is_fixed else MOVING_BYTES,
        host_cache_bytes=48 << 20,
        max_num_seqs=32,
        max_num_batched_tokens=384,
    )


def serve(
    engine: LocalEngine, cases: Sequence[Case], keys: Sequence[AdapterKey]
) -> tuple[list[list[int]], float]:
    """All cases, submitted while others run; their tokens and the wall time."""
    rng = random.Random(1)
    began = time.perf_counter()
    ids = []
    for case in cases:
        adapter = adapter_of(case, keys)
        ids.append(engine.submit(case.prompt, adapter, max_tokens=case.max_tokens, ignore_eos=True))
        if rng.random() < 0.5:
            engine.step()
    engine.run()
    return engine.tokens(ids), time.perf_counter() - began


Part = Callable[[Path, argparse.Namespace], dict[str, Any] | list[dict[str, Any]]]
PARTS: Mapping[str, Part] = {
    "serving": lambda folder, told: check_serving(
        folder, device=told.device, num_requests=told.requests
    ),
    "border": lambda folder, told: check_serving(
        folder, device=told.device, num_requests=told.requests, moves_border=True
    ),
    "serving_experts": lambda folder, told: check_serving_experts(
        folder, device=told.device, num_requests=told.requests
    ),
    "speculation": lambda folder, told: check_speculation(folder, device=told.device),
    "quantization": lambda folder, told: check_quantization(folder, device=told.device),
    "quantized_forms": lambda _, told: check_forms(told.device),
    "packed_experts": lambda _, told: check_packed_experts(told.device),
    "ranks": lambda folder, told: check_ranks(folder, device=told.device),
    "trainer": lambda folder, told: check_trainer(folder, told.device),
    "states": lambda folder, told: check_states(folder, device=told.device),
    "recurrences": lambda _, told: check_recurrences(told.device),
    "attention": lambda _, told: check_attention(told.device),
    "fused_layers": lambda _, told: check_fused_layers(told.device),
    "lora_rows": lambda _, told: check_rows(told.device),
    "lora_vectors": lambda _, told: check_vectors(told.device),
    "experts": lambda _, told: check_experts(told.device),
    "features": lambda _, told: check_features(told.device),
    "kernels": lambda _, told: time_kernels(told.device),
    "attention_times": lambda _, told: time_attention(told.device),
    "fused_times": lambda _, told: time_fused_layers(told.device),
    "expert_times": lambda _, told: time_experts(told.device),
    "linear_times": lambda *_: time_quantization(),
    "form_times": lambda *_: time_forms(),
    "packed_expert_times": lambda _, told: time_packed_experts(told.device),
    "recurrence_times": lambda _, told: time_recurrences(told.device),
    "rank_times": lambda folder, told: time_ranks(folder, told.device),
    "adapter_load": lambda _, told: time_adapter_load(told.device),
    "mixed_step": lambda _, told: time_mixed_step(told.device, Quantization.NONE),
    "mixed_step_int8": lambda _, told: time_mixed_step(told.device, Quantization.INT8),
    "mixed_step_int4": lambda _, told: time_mixed_step(told.device, Quantization.INT4),
    "idle": lambda folder, told: check_idle(folder, told.device),
    "prompts": lambda folder, told: time_prompts(folder, told.device),
    "speculation_times": lambda folder, told: time_speculation(folder, told.device),
}
CHECKS = (
    *("serving", "speculation", "quantization", "attention", "fused_layers", "lora_rows"),
    *("lora_vectors", "serving_experts", "experts", "features", "quantized_forms"),
    *("packed_experts", "states", "recurrences", "ranks", "trainer", "border"),
)
"""Of these parts what must hold is in `ok`."""
CUDA_PARTS = (
    *("attention", "fused_layers", "lora_rows", "lora_vectors", "serving_experts", "experts"),
    *("border", "quantized_forms", "attention_times", "fused_times", "expert_times"),
    *("packed_experts", "states", "recurrences", "recurrence_times", "trainer"),
    *("linear_times", "form_times", "packed_expert_times"),
    *("mixed_step", "mixed_step_int8", "mixed_step_int4"),
    *("idle", "prompts", "speculation_times", "rank_times"),
)
"""Kernels that there are nowhere else, and bases that are too large elsewhere."""


if __name__ == "__main__":
    sys.exit(main())
