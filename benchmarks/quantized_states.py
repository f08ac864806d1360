"""The part of the quantization matrix that has bases with states.

Every format of `quantized_bases` is made of small bases with linear attention, state spaces and
convolutions; GGUF has none of these types here. `errors` are the largest of a logit in fp32 against
transformers and PEFT over the format's values, in one mixed batch of the base and adapters of the
layers with states: DoRA, and LoRA with a whole head and trained tokens. Each is of the largest
logit. `kv` has for each `--kv-dtype` how many answers differ from those of the quantized base
alone, one request at a time, in an engine that has too few states for its requests; or the reason
why the engine refuses to start. `speculation` has such reasons of proposers. One format of each
kind has these two, with a base each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.errors import EngineError
from loraplex.engine.model.whole_base import load_base_model
from support.quantized_bases import QuantizedBase, makers
from support.quantized_states import (
    BASES,
    make_states_adapters,
    make_states_base,
    save_states_base,
)
from support.served_features import mixed_batch
from support.served_ways import PROPOSERS, Reference

BOUND = 1e-3
FEATURES = ("dora", "ends")
KV_BASES = {
    "gptq": "falcon_h1",
    "nf4": "lfm2",
    "deepseek-fp8": "jamba",
    "--quantize int4": "qwen3_next",
}
"""Format to the base with which its KV formats are tried."""


def try_formats(formats: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each base and format."""
    for name in BASES:
        dense = save_states_base(name, folder / name / "dense")
        adapters = make_states_adapters(name, dense, folder / name, FEATURES)
        for number, form in enumerate(formats):
            if not form.startswith("gguf"):
                yield _try_format(name, form, adapters, folder / name / str(number))


def _try_format(name: str, form: str, adapters: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    base = make_states_base(name, makers()[form], folder)
    errors: dict[str, float] = {}
    served = load_base_model(_config(base))
    for feature, logits in mixed_batch(served, base.plain, adapters, folder):
        error = float((logits.served - logits.by_peft).abs().max() / logits.by_peft.abs().max())
        errors[feature or "none"] = max(errors.get(feature or "none", 0.0), error)
    row: dict[str, Any] = {"format": form, "base": name, "errors": errors}
    if KV_BASES.get(form) == name:
        row["kv"] = {str(each): _try_kv(base, name, folder, each) for each in KvDtype}
        row["speculation"] = dict(_refused_proposers(base))
    return row


def _try_kv(
    base: QuantizedBase, base_name: str, folder: Path, kv_dtype: KvDtype
) -> dict[str, Any] | str:
    try:
        reference = Reference(
            base,
            folder / f"kv-{kv_dtype}",
            kv_dtype,
            proposers=("none",),
            targets=BASES[base_name].targets,
            num_prompts=18,
            is_quantized=True,
        )
    except EngineError as exc:
        return str(exc)
    (served,), happened = reference.serve()
    reference.close()
    return {"different": served.different, "near_ties": served.near_ties, **happened._asdict()}


def _refused_proposers(base: QuantizedBase) -> Iterator[tuple[str, str]]:
    for proposer in PROPOSERS[1:]:
        what = {"ngram": "", "draft": f":{base.plain}"}.get(proposer, ":1")
        try:
            load_base_model(_config(base, speculation=(f"{proposer}{what}",)))
        except EngineError as exc:
            yield proposer, str(exc)


def _config(base: QuantizedBase, **settings: Any) -> EngineConfig:
    return EngineConfig(
        str(base.served),
        device="cpu",
        dtype="float32",
        quantization=base.quantization,
        **settings,
    )


def find_faults(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each figure beyond its bound."""
    for row in rows:
        what = f"{row['format']}, {row['base']}"
        for feature, error in row["errors"].items():
            if not error <= BOUND:
                yield f"{what}, {feature}: error {error:.1e}, at most {BOUND:.0e}"
        for kv_dtype, served in row.get("kv", {}).items():
            if not isinstance(served, str):
                if served["different"]:
                    yield f"{what}, {kv_dtype}: {served['different']} answers differ"
                if not served["swaps"]:
                    yield f"{what}, {kv_dtype}: no swaps"
