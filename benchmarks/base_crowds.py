"""Every served model type in a crowd: preempted, swapped, from the prefix cache, with an adapter.

A tiny model's adapter, written by PEFT for all layers that PEFT takes, is compared with PEFT. Then
requests of the base and of the adapter come in a crowd that its cache cannot hold, once preempted
by recomputing and once by swapping with steps in flight. Every token must be the likeliest of the
dense model of transformers or PEFT.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.model_list import newest_families
from benchmarks.type_processes import NO_ANSWER, each_in_a_process
from peft import PeftModel
from transformers import AutoModelForCausalLM

from loraplex.engine.config import EngineConfig
from loraplex.engine.model.whole_base import load_base_model
from loraplex.engine.scheduling.step_costs import StepCosts
from support.family_configs import tiny_config
from support.greedy import load_dense
from support.models import make_adapter
from support.peft_parity import TOLERANCE, logit_errors
from support.served_crowd import check_crowd, crowded_engine, serve_crowd

SWAP_BYTES = 1 << 20
WAYS = {"recomputed": (0, False), "swapped": (SWAP_BYTES, True)}
"""Bytes of swap space, and whether the next step is scheduled while one runs."""
LEFT_OUT = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj"),
    "laguna": "shared_experts",
}
"""Layers that PEFT refuses, or whose weights it drops with a warning when it loads them."""
MAX_ROUTER_TIES = 1
"""Of a crowd's answers; a row counts them, so that it shows what was excused."""
SAME = "same tokens"


def crowds(model_types: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A row for each type of the newest evidence that is served."""
    if model_types is None:
        model_types = [row["type"] for row in newest_families() if row["result"] == "exact"]
    rows = []
    for model_type, outcome in each_in_a_process(model_types, try_crowd):
        rows.append(outcome or {"type": model_type, "result": NO_ANSWER})
        print(json.dumps(rows[-1]), file=sys.stderr)
    return sorted(rows, key=lambda row: str(row["type"]))


def try_crowd(model_type: str) -> dict[str, Any]:
    """What became of this type's crowds: the adapter's error, and how each crowd was served."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            return {"type": model_type, **_serve(model_type, path), "result": SAME}
        except Exception as exc:
            return {"type": model_type, "result": f"{type(exc).__name__}: {exc}"[:300]}


def _serve(model_type: str, path: Path) -> dict[str, Any]:
    model = _save(model_type, path / "model")
    adapter = make_adapter(
        model, path / "adapter", seed=1, scale=0.1, r=3, target_modules=_targets(model_type, model)
    )
    error = max(found / largest for found, largest in logit_errors(model, [adapter], path))
    assert error <= TOLERANCE, f"the adapter is off by {error:.1e}"
    StepCosts.swap_seconds = lambda *_: 0.0  # type: ignore[method-assign]  # whatever was measured
    row: dict[str, Any] = {"adapter_error": error}
    for way, (swap_bytes, is_async) in WAYS.items():
        engine = crowded_engine(model, path, swap_bytes=swap_bytes, is_async=is_async)
        key = engine.add_adapter(adapter)
        asked = serve_crowd(engine, [None, key])
        tuned = PeftModel.from_pretrained(load_dense(model), adapter).eval()
        dense = {None: load_dense(model), key: tuned}
        row[way] = check_crowd(engine, asked, dense, max_router_ties=MAX_ROUTER_TIES)
        engine.close()
    return row


def _save(model_type: str, path: Path) -> Path:
    config = tiny_config(model_type)
    # A random model with tied embeddings repeats its last token, whatever its cache says.
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def _targets(model_type: str, model: Path) -> list[str]:
    """The layers by the names of the model that PEFT loads, which may be a composite."""
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    served = {part.name for fused in base.projections for part in fused.projection.slices}
    names = [name for name, _ in load_dense(model).named_modules() if _in_text(name) in served]
    left_out = LEFT_OUT.get(model_type)
    return [name for name in names if left_out is None or left_out not in name]


def _in_text(name: str) -> str:
    return name.replace("language_model.", "")
