"""A base that is divided among ranks, beside one rank and PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from loraplex.adapters.layout import SliceKind
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.whole_base import load_base_model
from support.models import make_adapter
from support.peft_parity import mixed_logits, peft_logits
from support.ranks import run_sharded


class DividedErrors(NamedTuple):
    """The largest error of a logit over all ranks."""

    of_one_rank: float
    of_peft: float


class RankLogits(NamedTuple):
    """What one rank computes."""

    tokens: slice
    """Those whose logits it has."""
    logits: list[Tensor]
    """`[rows, tokens]` of each sequence."""

    def errors(self, expected: list[Tensor]) -> list[float]:
        """The largest of each sequence, given the logits of all tokens."""
        pairs = zip(self.logits, expected, strict=True)
        return [(ours - whole[:, self.tokens]).abs().max().item() for ours, whole in pairs]


def held_tokens(base: BaseModel) -> slice:
    """The tokens whose logits a rank of the last stage has: the first rank has all."""
    head = base.head_name
    if head is None or not base.stages.rank:
        return slice(None)
    outputs = base.part.range_of(base.layout.slice_index[head]).outputs
    return slice(outputs.start, outputs.stop)


def divided_errors(model: Path, size: int, folder: Path, *, num_stages: int = 1) -> DividedErrors:
    """Of a mixed batch: base rows, an adapter of all linear layers, one of two kinds of them, and
    one of the experts and their routers.

    `size`: the ranks of each stage. Raises UnsupportedModel if the base cannot be divided.
    """
    engine = EngineConfig(str(model), device="cpu", dtype="float32")
    alone = load_base_model(engine)
    folders = [
        make_adapter(model, folder / str(seed), seed=seed, scale=0.1, **lora)
        for seed, lora in enumerate(adapters_of(alone))
    ]
    blocks = [folder / f"blocks{rank}" for rank in range(size * num_stages + 1)]
    for path in blocks:
        path.mkdir()
    expected = mixed_logits(alone, folders, blocks[-1])

    def logits(base: BaseModel, rank: int) -> RankLogits:
        return RankLogits(held_tokens(base), mixed_logits(base, folders, blocks[rank]))

    of_last_stage = run_sharded(engine, size, logits, num_stages=num_stages)[:size]
    tuned = peft_logits(model, folders)
    return DividedErrors(
        max(max(ours.errors(expected)) for ours in of_last_stage),
        max(max(ours.errors(tuned)) for ours in of_last_stage),
    )


def adapters_of(base: BaseModel) -> list[dict[str, Any]]:
    """The settings of adapters that together change every layer of this base."""
    slices = [part for fused in base.projections for part in fused.projection.slices]
    names = sorted({part.name.rpartition(".")[2] for part in slices})
    if base.has_states:
        names = [name for name in names if name != "out_proj"]  # PEFT refuses that of state spaces
    # PEFT takes the experts along with linear layers of their names: both halves or none.
    few = [name for name in names if name not in ("gate_proj", "up_proj")][:2]
    is_turned = base.config.model_type == "gpt2"  # its weights are `[in, out]`
    adapters: list[dict[str, Any]] = [
        {"r": 2, "target_modules": names, "fan_in_fan_out": is_turned},
        {"r": 5, "target_modules": few, "fan_in_fan_out": is_turned},
    ]
    if parameters := list(_expert_parameters(base)):
        adapters.append({"r": 3, "target_modules": [], "target_parameters": parameters})
    return adapters


def _expert_parameters(base: BaseModel) -> Iterator[str]:
    """The parameters of its experts and their routers."""
    for layer in base.moe_layers:
        for part in layer.projections:
            (own,) = part.projection.slices
            yield own.name if own.kind is SliceKind.EXPERTS else f"{own.name}.weight"
