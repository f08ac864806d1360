"""Adapters of experts and routers equal PEFT itself, in one mixed batch with base rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters.arena import Arena
from loraplex.adapters.host_cache import HostCache
from loraplex.engine.base_model import BaseModel, load_base_model
from loraplex.engine.config import EngineConfig
from loraplex.kernels.lora_batch import LoraBatchBuilder
from support.families import SERVED, VOCAB_SIZE, save_family
from support.paged import paged_logits
from support.peft_blocks import make_tuned, write_peft_block

pytestmark = pytest.mark.filterwarnings(
    # PEFT says so of every pattern that names a parameter, and applies it.
    "ignore:The following (rank|alpha)_pattern keys did not match any:RuntimeWarning"
)
TOLERANCE = 1e-4
MIB = 1 << 20
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROUTERS = ["gate.weight", "router.weight"]
"""PEFT matches by suffix: a family has one of the two."""
FAMILIES = [
    "aria_text-transposed",
    "deepseek_v2-mla",
    "deepseek_v3-mla",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss-sinks-window",
    "granitemoe",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-of-moe": {"r": 3, "target_parameters": [*EXPERTS, *ROUTERS]},
    "other-rank-with-linears": {
        "r": 8,
        "lora_alpha": 4,
        "target_parameters": EXPERTS,
        "target_modules": ["o_proj"],
    },
    "patterns": {
        "r": 2,
        "use_rslora": True,
        "rank_pattern": {"gate_up_proj": 5},
        "alpha_pattern": {"down_proj": 16},
        "target_parameters": EXPERTS,
    },
    "one-layer": {"r": 4, "target_parameters": ["layers.2.mlp.experts.down_proj"]},
    "router-only": {"r": 4, "target_parameters": ROUTERS},
    "linears-only": {"r": 4, "target_modules": ["o_proj"]},
}
GRANITE_ONE_LAYER = {"target_parameters": ["layers.2.block_sparse_moe.experts.down_proj"]}


def load_dense(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()


def dense_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@dataclass
class Resident:
    """Adapters in a base's arena."""

    base: BaseModel
    builder: LoraBatchBuilder
    rows: list[tuple[int, int]]
    """Each adapter's (row, generation)."""

    def logits(self, sequences: list[list[int]], adapters: list[int | None]) -> list[Tensor]:
        """Of all sequences in one mixed batch; adapters by their place, None for the base."""
        rows = [(-1, 0) if index is None else self.rows[index] for index in adapters]
        return paged_logits(self.base, sequences, builder=self.builder, adapters=rows)


def make_resident(base: BaseModel, tuned: list[Any], blocks: Path) -> Resident:
    """Bring adapters to the arena as the engine does."""
    arena = Arena(base.layout, 8 * MIB, base.dtype, base.device)
    base.attach_arena(arena)
    host = HostCache(base.layout, 8 * MIB, base.dtype)
    rows = []
    for index, adapter in enumerate(tuned):
        path = blocks / f"{index}.block"
        key = write_peft_block(path, adapter, base.layout)
        block = host.read(key, path)
        assert block is not None
        placement = arena.place(key, block.num_elements, block.table, block.extras)
        assert placement is not None
        arena.copy_into(placement, block)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
    return Resident(base, LoraBatchBuilder(arena, base.device), rows)


def draw_sequences(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(VOCAB_SIZE, (17 + 5 * index % 11,), generator=generator).tolist()
        for index in range(count)
    ]


def check_against_peft(model: Path, adapters: list[dict[str, Any]], blocks: Path) -> None:
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    tuned = [
        make_tuned(load_dense(model), seed=index, **lora) for index, lora in enumerate(adapters)
    ]
    resident = make_resident(base, tuned, blocks)
    sequences = draw_sequences(len(tuned) + 2)
    order = [None, *range(len(tuned)), None]

    logits = resident.logits(sequences, order)

    dense = load_dense(model)
    for index, tokens, ours in zip(order, sequences, logits, strict=True):
        plain = dense_logits(dense, tokens)
        expected = plain if index is None else dense_logits(tuned[index], tokens)
        if index is not None:
            assert (expected - plain).abs().max() > 100 * TOLERANCE, "it must have an effect"
        assert (ours - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_routers_of_each_family_equal_peft_in_one_mixed_batch(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "base", *SERVED[family])
    adapters = dict(ADAPTERS)
    if family == "granitemoe":
        adapters["one-layer"] = {**adapters["one-layer"], **GRANITE_ONE_LAYER}
    check_against_peft(model, list(adapters.values()), tmp_path)
