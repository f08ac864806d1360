"""A base that is divided among ranks, beside one rank and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from loraplex.engine.config import EngineConfig, KvDtype
from loraplex.engine.model.base_model import BaseModel, load_base_model
from support.models import make_adapter
from support.peft_parity import mixed_logits, peft_logits
from support.ranks import run_sharded


class DividedErrors(NamedTuple):
    """The largest error of a logit over all ranks."""

    of_one_rank: float
    of_peft: float


def divided_errors(
    model: Path, size: int, folder: Path, kv_dtype: KvDtype = KvDtype.AUTO
) -> DividedErrors:
    """Of a mixed batch: base rows, an adapter of all linear layers, one of two kinds of them.

    Raises UnsupportedModel if the base cannot be divided.
    """
    engine = EngineConfig(str(model), device="cpu", dtype="float32", kv_dtype=kv_dtype)
    alone = load_base_model(engine)
    targets = targets_of(alone)
    folders = [
        make_adapter(model, folder / str(r), seed=r, scale=0.1, r=r, target_modules=names)
        for r, names in ((2, targets), (5, targets[:2]))
    ]
    blocks = [folder / f"blocks{rank}" for rank in range(size + 1)]
    for path in blocks:
        path.mkdir()
    expected = mixed_logits(alone, folders, blocks[size])

    def logits(base: BaseModel, rank: int) -> list[Tensor]:
        return mixed_logits(base, folders, blocks[rank])

    of_ranks = run_sharded(engine, size, logits)
    tuned = peft_logits(model, folders)
    return DividedErrors(
        max(_error(ours, expected) for ours in of_ranks),
        max(_error(ours, tuned) for ours in of_ranks),
    )


def targets_of(base: BaseModel) -> list[str]:
    """The names of its linear layers, as adapters target them."""
    slices = [part for fused in base.projections for part in fused.projection.slices]
    return sorted({part.name.rpartition(".")[2] for part in slices})


def _error(ours: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(ours, expected, strict=True)
    return max((row - other).abs().max().item() for row, other in pairs)
