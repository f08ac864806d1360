"""Serves every quantized format with every PEFT feature, KV format and proposer; prints JSON.

    make quantization-matrix [ARGS='--formats gptq awq'] [ARGS=--states]

Formats are those of `quantization_evidence`, those of `--quantize`, and GGUF files. `features` are
the rows of `docs/formats.md`: the largest error of a logit in mixed batches in fp32 against PEFT
over the format's values, of the largest logit. `bf16` is the largest error of a feature in bf16, as
a multiple of PEFT's own in bf16, both against PEFT in fp32: each the median over the tokens of the
logits' root mean square, because a token that rounding sends to another expert is far off.

`kv` has an entry for each `--kv-dtype`: by proposer, how many answers differ from those of the
dense base, alone, without draft tokens and without any reuse, other than at a near tie. With KV in
int4 and int2 the reference is the quantized base: keys that differ by the rounding of inputs may
get another code. Requests with two adapters and with all proposers share an engine that has too
little memory for them, so prefixes are reused and sequences are swapped out. Instead of an entry
there is the reason why the engine refuses to start; `refused` are such reasons of proposers. With
`--states` there are bases with states instead, see `quantized_states`. Exits with 1 if an answer
differs or an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks import quantized_states
from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.errors import EngineError
from loraplex.engine.model.whole_base import load_base_model
from support.models import make_tiny_llama
from support.peft_features import save_base
from support.quantized_bases import Maker, QuantizedBase, makers
from support.served_features import features_by_base, make_adapters, mixed_batch
from support.served_ways import PROPOSERS, Reference, refusal

BOUND = 1e-3
BF16_BOUND = 2.0
NOT_IN_FILES = {"gguf": ("mixtral", "llama_bias")}
"""Bases whose architecture or tensors the format's files do not have."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="*", choices=makers(), default=list(makers()))
    parser.add_argument("--states", action="store_true", help="bases with states instead")
    options = parser.parse_args(arguments)
    with redirect_stdout(sys.stderr), TemporaryDirectory() as name:  # libraries print too
        os.environ["XDG_CACHE_HOME"] = name
        if options.states:
            rows = list(quantized_states.try_formats(options.formats, Path(name)))
        else:
            rows = [try_format(each, Path(name) / str(i)) for i, each in enumerate(options.formats)]
    print(json.dumps({"states" if options.states else "formats": rows}))
    faults = list((quantized_states.find_faults if options.states else find_faults)(rows))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def try_format(name: str, folder: Path) -> dict[str, Any]:
    """One format's row."""
    maker = makers()[name]
    features: dict[str, float] = {}
    in_bf16: dict[str, float] = {}
    for base_name, rows in features_by_base().items():
        if base_name in NOT_IN_FILES.get(name.partition("-")[0], ()):
            continue
        errors, ratios = try_features(maker, base_name, rows, folder / base_name)
        features |= errors
        in_bf16 |= ratios
    base = maker(make_tiny_llama(folder / "dense", seed=1), folder / "served")
    return {
        "format": name,
        "features": features,
        "bf16": max(in_bf16.values()),
        "kv": {str(each): try_kv(base, folder / f"kv-{each}", each) for each in KvDtype},
    }


def try_features(
    maker: Maker, base_name: str, features: Sequence[str], folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each feature the error in fp32 and, as a multiple of PEFT's own, in bf16."""
    base = maker(save_base(base_name, folder / "dense"), folder / "served")
    adapters = make_adapters(features, base.plain, folder)
    exact, errors, ratios = {}, {}, {}
    for name, logits in mixed_batch(_load(base, "float32"), base.plain, adapters, folder):
        if name:
            exact[name] = logits.by_peft
            errors[name] = _largest(logits.served - logits.by_peft) / _largest(logits.by_peft)
    rounded = mixed_batch(
        _load(base, "bfloat16"), base.plain, adapters, folder, dtype=torch.bfloat16
    )
    for name, logits in rounded:
        if name:
            ours, theirs = logits.served - exact[name], logits.by_peft.float() - exact[name]
            ratios[name] = _typical(ours) / _typical(theirs)
    return errors, ratios


def try_kv(base: QuantizedBase, folder: Path, kv_dtype: KvDtype) -> dict[str, Any] | str:
    """What is served with this KV format, or why nothing is."""
    try:
        reference = Reference(base, folder, kv_dtype)
    except EngineError as exc:
        return str(exc)
    served, happened = reference.serve()
    reference.close()
    refusals = {each: refusal(kv_dtype, each) for each in PROPOSERS}
    return {
        "different": {each.proposer: each.different for each in served},
        "refused": {each: why for each, why in refusals.items() if why},
        "near_ties": sum(each.near_ties for each in served),
        "accepted": sum(each.accepted for each in served),
        **happened._asdict(),
    }


def find_faults(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each figure beyond its bound."""
    for row in rows:
        for feature, error in row["features"].items():
            if not error <= BOUND:
                yield f"{row['format']}, {feature}: error {error:.1e}, at most {BOUND:.0e}"
        if not row["bf16"] <= BF16_BOUND:
            yield f"{row['format']} in bf16: {row['bf16']:.2f} times PEFT's own error"
        for kv_dtype, served in row["kv"].items():
            if isinstance(served, str):
                continue
            for proposer, different in served["different"].items():
                if different:
                    yield f"{row['format']}, {kv_dtype}, {proposer}: {different} answers differ"
            for name in ("swaps", "cached_tokens", "accepted"):
                if not served[name]:
                    yield f"{row['format']}, {kv_dtype}: no {name}"


def _load(base: QuantizedBase, dtype: str) -> Any:
    config = EngineConfig(
        str(base.served), device="cpu", dtype=dtype, quantization=base.quantization
    )
    return load_base_model(config)


def _typical(errors: Tensor) -> float:
    return float(errors.norm(dim=-1).median())


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


if __name__ == "__main__":
    sys.exit(main())
