"""Adapters of experts in the layouts of several trainers, and the models that they make of a base.

PEFT loads few of these layouts. `merge_experts` adds each expert's scale·B·A to its matrix in plain
PyTorch, by the tensors' names alone.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PREFIX = "base_model.model."
UP, DOWN = ("up_proj", "w3"), ("down_proj", "w2")
_NOT_WITHOUT_GATE = ("gate_proj", "w3", "gate_up_proj")
_NAME = re.compile(rf"{PREFIX}(.*)\.experts\.(?:(\d+)\.)?(\w+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class ExpertsLayout:
    """How a trainer writes the matrices of a layer's experts."""

    modules: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    experts: tuple[int, ...] | None = None
    """Those that have matrices of their own file names; None: each module's are one tensor."""
    shares_a: tuple[str, ...] = ()
    """Modules whose A all experts share."""
    shares_b: tuple[str, ...] = ()
    block: str | None = None
    """What the block around the experts is called instead."""
    config: Mapping[str, Any] | None = None


_SEPARATE = (0, 1, 2, 3)
LAYOUTS: dict[str, ExpertsLayout] = {
    "separate": ExpertsLayout(experts=_SEPARATE),
    "separate-of-transformers-4": ExpertsLayout(
        ("w1", "w2", "w3"), _SEPARATE, block="block_sparse_moe"
    ),
    "separate-in-part": ExpertsLayout(("up_proj",), (1, 3)),
    "stacked": ExpertsLayout(),
    "stacked-parameters": ExpertsLayout(("gate_up_proj", "down_proj")),
    "shared-outer": ExpertsLayout(("w1", "w2", "w3"), shares_a=("w1", "w3"), shares_b=("w2",)),
    "shared-outer-parameters": ExpertsLayout(
        ("gate_up_proj", "down_proj"), shares_a=("gate_up_proj",), shares_b=("down_proj",)
    ),
    "shared-inner": ExpertsLayout(shares_a=("down_proj",), shares_b=("gate_proj", "up_proj")),
    "separate-with-shared": ExpertsLayout(
        experts=(0, 2, 3), shares_a=("gate_proj", "up_proj"), shares_b=("down_proj",)
    ),
    "all-shared": ExpertsLayout(
        ("gate_proj", "down_proj"),
        shares_a=("gate_proj", "down_proj"),
        shares_b=("gate_proj", "down_proj"),
    ),
    "ranks-and-alphas": ExpertsLayout(
        experts=_SEPARATE,
        config={
            "use_rslora": True,
            "rank_pattern": {"gate_proj": 5, "experts.2.down_proj": 2},
            "alpha_pattern": {"experts.1.up_proj": 32, "layers.1.mlp.experts.3.gate_proj": 3},
        },
    ),
}
"""By name. Experts without a gate have no modules for it."""


def write_expert_adapter(
    folder: Path, layout: ExpertsLayout, model: nn.Module, *, seed: int, scale: float = 0.2
) -> Path:
    """Write a random adapter of all the experts of `model` in this layout."""
    generator = torch.Generator().manual_seed(seed)
    config = {"r": 3, "lora_alpha": 6, **(layout.config or {})}
    tensors: dict[str, Tensor] = {}
    for path, experts in expert_modules(model):
        block = path.rpartition(".")[0]
        if layout.block is not None:
            block = f"{block.rpartition('.')[0]}.{layout.block}"
        for module in layout.modules:
            if module in _NOT_WITHOUT_GATE and not experts.has_gate:
                continue
            for name, shape in _shapes(f"{block}.experts", module, experts, layout, config):
                tensors[PREFIX + name] = torch.randn(shape, generator=generator) * scale
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **config}
    fields["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def _shapes(
    path: str, module: str, experts: Any, layout: ExpertsLayout, config: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of one module of a layer's experts."""
    rows, columns = _matrix(experts, 0, module).shape
    sides = {"A": module in layout.shares_a, "B": module in layout.shares_b}
    for side, is_shared in sides.items():
        names = [f"{path}.{module}"]
        if layout.experts is not None and not is_shared:
            names = [f"{path}.{expert}.{module}" for expert in layout.experts]
        for name in names:
            rank, _ = rank_and_scale(config, name)
            shape: tuple[int, ...] = (rank, columns) if side == "A" else (rows, rank)
            if len(names) == 1:
                shape = (1 if is_shared else experts.num_experts, *shape)
            yield f"{name}.lora_{side}.weight", shape


def merge_experts(base: nn.Module, folder: Path) -> Any:
    """A copy of `base` with the adapter's experts added to its own."""
    model = copy.deepcopy(base)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    parsed = [(match, tensors[match[0]]) for match in map(_NAME.fullmatch, tensors) if match]
    assert len(parsed) == len(tensors)
    for path, experts in expert_modules(model):
        layer = path.split(".experts")[0].rpartition(".")[0]
        for expert in range(experts.num_experts):
            found: dict[str, dict[str, tuple[Tensor, str]]] = {}
            for match, values in parsed:
                block, number, module, side = match.groups()
                if block.rpartition(".")[0] != layer or number not in (None, str(expert)):
                    continue
                if values.ndim == 3:
                    values = values[min(expert, len(values) - 1)]
                name = match[0].removeprefix(PREFIX).split(".lora_")[0]
                found.setdefault(module, {})[side] = values, name
            for module, sides in found.items():
                if sides.keys() == {"A", "B"}:
                    (a, _), (b, name) = sides["A"], sides["B"]
                    with torch.no_grad():
                        _matrix(experts, expert, module).add_(
                            rank_and_scale(config, name)[1] * (b @ a)
                        )
    return model


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Of a module, by PEFT's own matching of patterns."""
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    rank = ranks.get(get_pattern_key(ranks.keys(), name), config["r"])
    alpha = alphas.get(get_pattern_key(alphas.keys(), name), config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def expert_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Path and module of each layer's stacked experts."""
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "has_gate")]


def _matrix(experts: Any, expert: int, module: str) -> Tensor:
    """An expert's `[out, in]` of this module: a view of the parameter."""
    if module in DOWN:
        return _rows(experts, experts.down_proj[expert])
    if not experts.has_gate:
        return _rows(experts, experts.up_proj[expert])
    both = _rows(experts, experts.gate_up_proj[expert])
    if module == "gate_up_proj":
        return both
    if experts.is_concatenated:
        return both.chunk(2)[module in UP]
    return both[int(module in UP) :: 2]


def _rows(experts: Any, matrix: Tensor) -> Tensor:
    return matrix.T if experts.is_transposed else matrix
