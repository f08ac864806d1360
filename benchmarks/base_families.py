"""Every model type that transformers has as a causal language model: exact, or refused.

Each type's tiny model is saved, loaded as a base, and computes 300 tokens in the paged, chunked,
mixed forward pass, together with shorter sequences. The reference is its own dense forward pass in
fp32. Layers are fused by the CPU's library. Where there is none, the pass is repeated with the
plain ops that kernels replace.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.type_processes import NO_ANSWER, each_in_a_process
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.engine.checkpoint.weights import load_config
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import UnsupportedModel
from loraplex.engine.model.admission import check_config
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.fused_layers import FusedLayers, fuse_layers
from loraplex.engine.model.whole_base import load_base_model
from support.family_configs import MODEL_TYPES, NUM_TOKENS, tiny_config
from support.paged import paged_logits

TOLERANCE = 1e-4
"""Largest error relative to the largest logit, in fp32."""
OTHER_LENGTHS = (1, 41)
VOCAB_SIZE = 128
_FIRST_PLAIN_TOKEN = 3
_FOLDER = re.compile(rf"{re.escape(tempfile.gettempdir())}/\w+(: | is | )")
"""How a message names the folder of a type's model."""

EXACT, REFUSED, NOT_BUILT, WRONG, CRASHED = "exact", "refused", "not built", "wrong", "crashed"
ANSWERS = (EXACT, REFUSED)
"""What may become of a type that transformers builds."""


@dataclass(frozen=True)
class Outcome:
    """What became of one model type."""

    type: str
    tokens: int
    """Of the longest sequence that was compared."""
    max_error: float | None
    """Of a logit, relative to the largest of its sequence."""
    result: str
    fused: tuple[str, ...] = ()
    """The kinds of layers of which all are fused."""
    reason: str | None = None
    """For those that are not exact; a refusal's begins with its code, and names no folder."""

    @property
    def is_right(self) -> bool:
        return self.result in (*ANSWERS, NOT_BUILT)

    def as_row(self) -> dict[str, Any]:
        row = asdict(self)
        if self.result != REFUSED:
            del row["reason"]
        return row


class NotBuilt(Exception):
    """transformers does not build or run this type from a tiny configuration."""


def families(model_types: Sequence[str] = MODEL_TYPES) -> list[dict[str, Any]]:
    """A row for each type that transformers builds; the others are named on standard error."""
    outcomes = []
    for outcome in try_all(model_types):
        print(f"{outcome.type}: {outcome.result} {outcome.reason or ''}", file=sys.stderr)
        outcomes.append(outcome)
    outcomes.sort(key=lambda outcome: outcome.type)
    return [outcome.as_row() for outcome in outcomes if outcome.result != NOT_BUILT]


def try_all(model_types: Sequence[str]) -> Iterator[Outcome]:
    """The outcomes as they come."""
    for model_type, outcome in each_in_a_process(model_types, try_type):
        yield outcome or Outcome(model_type, 0, None, CRASHED, reason=NO_ANSWER)


def try_type(model_type: str) -> Outcome:
    """What becomes of this type's tiny model."""
    try:
        error, fused = _compare(model_type)
    except NotBuilt as exc:
        return Outcome(model_type, 0, None, NOT_BUILT, reason=str(exc))
    except UnsupportedModel as exc:
        reason = _FOLDER.sub("", str(exc))
        return Outcome(model_type, 0, None, REFUSED, reason=f"{exc.code}: {reason}")
    except Exception as exc:
        return Outcome(model_type, 0, None, CRASHED, reason=f"{type(exc).__name__}: {exc}")
    if error <= TOLERANCE:
        return Outcome(model_type, NUM_TOKENS, error, EXACT, fused)
    return Outcome(model_type, NUM_TOKENS, error, WRONG, reason=f"error {error:.1e}")


def _compare(model_type: str) -> tuple[float, tuple[str, ...]]:
    """The largest error, and what is fused.

    Raises NotBuilt, UnsupportedModel, or AssertionError if the comparison could not fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config = _config(model_type, path)
        check_config(load_config(path), max_model_len=None)  # what no weights are needed to refuse
        sequences = _sequences()
        expected = _build(config, path, sequences)
        base = load_base_model(EngineConfig(str(path), device="cpu"))
        error = _error(paged_logits(base, sequences), expected)
        _check_sensitivity(base, sequences[:1], expected[:1])
        fused = base.fused
        if fused is None:  # without the CPU's library
            fused = fuse_layers(base.model)
            error = max(error, _error(paged_logits(base, sequences), expected))
    return error, _fused_kinds(fused)


def _fused_kinds(fused: FusedLayers) -> tuple[str, ...]:
    shares = {
        "norms": fused.norms,
        "activations": fused.activations,
        "rotary embeddings": fused.rotary,
    }
    return tuple(kind for kind, share in shares.items() if 0 < share.num_layers == share.num_fused)


def _config(model_type: str, path: Path) -> Any:
    try:
        config = tiny_config(model_type)
        config.save_pretrained(path)
    except Exception as exc:
        raise NotBuilt(_reason("its configuration", exc)) from exc
    return config


def _build(config: Any, path: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Save a random model; return its own dense logits of the sequences."""
    try:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        with torch.inference_mode():
            logits = [
                model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
                for tokens in sequences
            ]
        model.save_pretrained(path)
    except Exception as exc:
        raise NotBuilt(_reason("its model", exc)) from exc
    return logits


def _reason(what: str, exc: Exception) -> str:
    return f"{what}: {type(exc).__name__}: {' '.join(str(exc).split())[:200]}"


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(_FIRST_PLAIN_TOKEN, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (NUM_TOKENS, *OTHER_LENGTHS)
    ]


def _error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)
    )


def _check_sensitivity(base: BaseModel, sequences: list[list[int]], expected: list[Tensor]) -> None:
    """Without its windows the model must differ, or the comparison says nothing of them."""
    assert expected[0].std() > 0.01, "the model says nothing"
    if all(shape.window is None for shape in base.kv_shapes):
        return
    blind = replace(base, kv_shapes=[shape._replace(window=None) for shape in base.kv_shapes])
    assert _error(paged_logits(blind, sequences), expected) > 100 * TOLERANCE, (
        "its windows change nothing"
    )
