"""Serves quantized checkpoints of every format and compares them with their values; prints JSON.

    make quantization-evidence [ARGS='--formats gptq awq --mutations 1000']

For each format, a small model is written by the format's own library where one installs, else from
the format's description. `max_error` is the largest error of a logit against transformers' model
of the values that the writer says it stored, `adapters_max_error` that of mixed batches with
adapters (LoRA, DoRA, both ends of the model, a whole head) against PEFT over those values, dense
and with experts, relative to the largest logit. `bytes_over_bf16` is a large layer's memory as it
is served, with groups of 128 inputs where the format leaves their size open. Where activations
are quantized too, the reference does so in the same way. `mutations` are damaged checkpoints.
Exits with 1 if a figure exceeds its bound, and names it on standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarks.quantized_mutations import try_mutations
from torch import Tensor

from loraplex.engine.checkpoint.stored_weights import stored_weights
from loraplex.kernels.linear_packing import pack_linear
from support.features import Feature, World, dense_logits, make_world
from support.quantized_checkpoints import FORMATS, formats, write_weights

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--mutations", type=int, default=2000)
    options = parser.parse_args(arguments)
    with redirect_stdout(sys.stderr), TemporaryDirectory() as folder:  # libraries print too
        rows = []
        for name in options.formats:
            rows.append(try_format(name, Path(folder, name)))
            print(rows[-1], flush=True)
        mutations = try_mutations(Path(folder, "mutations"), range(options.mutations))
    evidence = {
        "formats": rows,
        "mutations": {
            "tried": mutations.tried,
            "crashes": len(mutations.crashes),
            "uncoded": len(mutations.crashes),
            "outcomes": dict(mutations.outcomes),
            "peak_growth_mib": mutations.peak_growth_mib,
        },
    }
    print(json.dumps(evidence))
    faults = [*find_faults(evidence), *mutations.crashes]
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
    for row in evidence["formats"]:
        for figure, bound in (("max_error", "bound"), ("adapters_max_error", "adapters_bound")):
            if not row[figure] <= row[bound]:
                yield f"{row['name']}: {figure} {row[figure]:.1e}, at most {row[bound]:.1e}"
        if row["name"] in FOUR_BITS and row["bytes_over_bf16"] > MAX_FOUR_BITS:
            yield f"{row['name']}: {row['bytes_over_bf16']:.3f} of its bytes in bf16"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _error(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    sys.exit(main())
