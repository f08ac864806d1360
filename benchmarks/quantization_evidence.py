"""Serves quantized checkpoints of every format and compares them with their values; prints JSON.

    make quantization-evidence [ARGS='--formats gptq awq --mutations 1000']

For each of the `formats`, a small model is written by the format's own library where one installs,
else from the format's description. `max_error` is the largest error of a logit against
transformers' model of the values that the writer says it stored, `adapters_max_error` that of mixed
batches with adapters (LoRA, DoRA, both ends of the model, a whole head) against PEFT over those
values, dense and with experts, relative to the largest logit. Where activations are quantized too,
the reference does so in the same way. `bytes_over_bf16` is a large layer's memory as it is served,
with groups of 128 inputs where the format leaves their size open.

`mutations` are damaged checkpoints. `kv` compares the formats of the KV cache with bf16: the tokens
that fit in sequences of 32,768, and the mean KL on the demo's base. `mla` are the bytes per token
of DeepSeek-V3's latent attention, and the largest error of a small model's logits against
transformers. `eviction` is the share of needles that KV eviction finds in contexts of 500 tokens,
beside that with the full cache (`bench_kv_eviction`). Exits with 1 if a figure exceeds its bound,
and names it on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarks.bench_kv_dtype import DEMO_BASE, measure, sample_text
from benchmarks.bench_kv_eviction import measure as measure_eviction
from benchmarks.quantized_mutations import try_mutations
from torch import Tensor

from loraplex.engine.checkpoint.stored_weights import stored_weights
from loraplex.engine.config import EngineConfig
from loraplex.engine.kv.cache import KvFormat, kv_bytes_per_block
from loraplex.engine.kv.groups import LayerKvShape, one_group
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.linear_packing import pack_linear
from support.families import SERVED, save_family
from support.features import Feature, World, dense_logits, load_plain, make_world
from support.paged import paged_logits
from support.quantized_checkpoints import FORMATS, formats, write_weights

SECTIONS = ("formats", "mutations", "kv", "mla", "eviction")
BOUND = 1e-3
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEATURES: Mapping[str, list[Feature]] = {
    "llama": [
        {"target_modules": LINEAR},
        {"target_modules": LINEAR, "use_dora": True, "r": 5},
        {"target_modules": ["embed_tokens", "lm_head", "up_proj"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    ],
    "qwen3_moe": [
        {"target_modules": ATTENTION},
        {"target_modules": ATTENTION, "use_dora": True, "r": 5},
    ],
}
"""By family: a dense one and one with experts."""
LARGE, LARGE_GROUP = (512, 2048), 128
FOUR_BITS = ("gptq", "gptq-ordered", "awq", "ct-int4", "ct-int4-asymmetric")
MAX_FOUR_BITS = 0.28
"""Of the bytes in bf16, for formats whose scales are of 16 bits for each 128 inputs."""
MIN_ROOM = {"int4": 3.5, "int2": 6.0}
MAX_LATENT_ERROR = 1e-4
SEQUENCES = [list(range(3, 44)), [5], list(range(60, 90))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--mutations", type=int, default=2000)
    options = parser.parse_args(arguments)
    with redirect_stdout(sys.stderr), TemporaryDirectory() as name:  # libraries print too
        folder = Path(name)
        sections: dict[str, Callable[[], Any]] = {
            "formats": lambda: [try_format(each, folder / each) for each in options.formats],
            "mutations": lambda: mutations(folder / "mutations", options.mutations),
            "kv": kv_formats,
            "mla": lambda: latent_attention(folder / "mla"),
            "eviction": lambda: eviction(_made(folder / "eviction")),
        }
        evidence = {name: run() for name, run in sections.items() if name in options.only}
    print(json.dumps(evidence))
    faults = list(find_faults(evidence))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def try_format(name: str, folder: Path) -> dict[str, Any]:
    """One format's row."""
    form = FORMATS[name]
    plain, adapted = [], []
    for family, features in FEATURES.items():
        world = make_world(_made(folder / family), family, features, form=form)
        errors = logit_errors(world)
        plain += [errors[0], errors[-1]]
        adapted += errors[1:-1]
    return {
        "name": name,
        "writer": form.writer,
        "max_error": max(plain),
        "bound": BOUND,
        "adapters_max_error": max(adapted),
        "adapters_bound": BOUND,
        "bytes_over_bf16": bytes_over_bf16(name, folder / "large"),
    }


def mutations(folder: Path, count: int) -> dict[str, Any]:
    """What became of so many damaged checkpoints."""
    found = try_mutations(folder, range(count))
    return {
        "tried": found.tried,
        "crashes": len(found.crashes),
        "uncoded": len(found.crashes),
        "first_crash": next(iter(found.crashes), None),
        "outcomes": dict(found.outcomes),
        "peak_growth_mib": found.peak_growth_mib,
    }


def kv_formats() -> list[dict[str, Any]]:
    """The formats of the KV cache beside bf16."""
    base = load_base_model(EngineConfig(str(DEMO_BASE), device="cpu", dtype="bfloat16"))
    text = sample_text(base, num_sequences=8, length=256, seed=0)
    return [
        {"format": each.kv_dtype, "tokens_over_bf16": each.room, "kl": each.mean_kl}
        for each in measure(base, text)
    ]


def latent_attention(folder: Path) -> dict[str, float]:
    """Sizes of one layer of DeepSeek-V3 in bf16, and the error of a small model of its type."""
    shapes = (LayerKvShape(1, 576, 512, is_latent=True), LayerKvShape(128, 192, 128))
    latent, expanded = (
        kv_bytes_per_block(
            one_group(1, 2)[0], [shape], block_size=1, kv_format=KvFormat(torch.bfloat16)
        )
        for shape in shapes
    )
    path = save_family(_made(folder), *SERVED["deepseek_v3-mla"])
    base, dense = load_base_model(EngineConfig(str(path), device="cpu")), load_plain(path)
    assert all(shape.is_latent for shape in base.kv_shapes)
    errors = [
        _error(ours, dense_logits(dense, tokens))
        for tokens, ours in zip(SEQUENCES, paged_logits(base, SEQUENCES), strict=True)
    ]
    return {
        "bytes_per_token": latent,
        "expanded_bytes_per_token": expanded,
        "max_error": max(errors),
    }


def eviction(folder: Path) -> list[dict[str, Any]]:
    """The needles that KV eviction leaves in the cache."""
    results = measure_eviction(folder, length=500, num_needles=20, num_copies=1, budgets=(64, 128))
    return [
        {
            "policy": each.policy,
            "budget": each.budget,
            "needle_right": each.needle_right,
            "full_right": each.full_right,
        }
        for each in results
    ]


def logit_errors(world: World) -> list[float]:
    """Of the base, each adapter and the base again, in one batch."""
    sequences = world.sequences()
    models = [world.plain, *world.tuned, world.plain]
    return [
        _error(ours, dense_logits(model, tokens))
        for ours, model, tokens in zip(world.serve(sequences), models, sequences, strict=True)
    ]


def bytes_over_bf16(name: str, folder: Path) -> float:
    """A large layer's bytes as it is served, of those in bf16."""
    weight = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    path, _ = write_weights(folder, {"layer.weight": weight}, formats(LARGE_GROUP)[name])
    linear = pack_linear(stored_weights(path)["layer.weight"].read())
    return linear.weight_bytes / (2 * weight.numel())


def find_faults(evidence: Mapping[str, Any]) -> Iterator[str]:
    """One line for each figure beyond its bound."""
    for row in evidence.get("formats", []):
        for figure, bound in (("max_error", "bound"), ("adapters_max_error", "adapters_bound")):
            if not row[figure] <= row[bound]:
                yield f"{row['name']}: {figure} {row[figure]:.1e}, at most {row[bound]:.1e}"
        if row["name"] in FOUR_BITS and row["bytes_over_bf16"] > MAX_FOUR_BITS:
            yield f"{row['name']}: {row['bytes_over_bf16']:.3f} of its bytes in bf16"
    for row in evidence.get("kv", []):
        if row["tokens_over_bf16"] < MIN_ROOM.get(row["format"], 0.0):
            yield f"--kv-dtype {row['format']}: {row['tokens_over_bf16']:.2f} times the tokens"
    if "mla" in evidence and evidence["mla"]["max_error"] > MAX_LATENT_ERROR:
        yield f"latent attention: error {evidence['mla']['max_error']:.1e}"
    for row in evidence.get("eviction", []):
        if row["full_right"] < 1:
            yield f"the full cache: {row['full_right']:.0%} of the needles"
    if "mutations" in evidence and evidence["mutations"]["crashes"]:
        yield f"a damaged checkpoint: {evidence['mutations']['first_crash']}"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    sys.exit(main())
