"""What adapters hold beyond A and B of linear layers equals PEFT itself, in one mixed batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.adapters.arena import Arena
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.base_model import BaseModel, load_base_model
from loraplex.engine.block_preparation import BlockPreparation
from loraplex.engine.config import EngineConfig
from loraplex.kernels.lora_batch import LoraBatchBuilder
from support.families import SERVED, VOCAB_SIZE, save_family
from support.feature_blocks import write_peft_block
from support.paged import paged_logits

TOLERANCE = 1e-4
MIB = 1 << 20
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = [3, 17, 5, 90, 127]

Feature = dict[str, Any]
"""Arguments of LoraConfig."""

LLAMA: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "head": {"target_modules": ["lm_head"]},
    "head and layers": {"target_modules": ["lm_head", "q_proj"], "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both ends": {"target_modules": ["embed_tokens", "lm_head", "up_proj"], "r": 9},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "dora, some siblings": {"target_modules": ["k_proj", "up_proj"], "use_dora": True, "r": 33},
    "dora, both ends": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "lora bias": {"target_modules": [*LINEAR, "lm_head"], "lora_bias": True},
    "whole head": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "whole embedding": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "whole ends": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS},
}
TIED: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "head of a tied pair": {"target_modules": ["lm_head"]},
    "embedding of a tied pair": {"target_modules": ["embed_tokens"]},
    "embedding, kept tied": {
        "target_modules": ["embed_tokens", "q_proj"],
        "ensure_weight_tying": True,
    },
    "dora on the embedding": {"target_modules": ["embed_tokens"], "use_dora": True},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole embedding, kept tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tokens, tied by PEFT": {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
    "tokens of the head": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS[:2], "lm_head": TOKENS[1:]},
    },
}
BIASES: dict[str, Feature] = {
    "plain": {"target_modules": LINEAR},
    "bias of the layers": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
    "dora beside a bias": {"target_modules": LINEAR, "use_dora": True},
    "dora and bias": {"target_modules": LINEAR, "use_dora": True, "bias": "lora_only"},
    "lora bias": {"target_modules": ["q_proj", "k_proj"], "lora_bias": True},
    "both biases": {"target_modules": ["k_proj"], "lora_bias": True, "bias": "lora_only"},
    "all biases": {"target_modules": ["k_proj"], "bias": "all"},
}
_CONV1D: Feature = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
CONV1D: dict[str, Feature] = {
    "dora": {**_CONV1D, "use_dora": True},
    "lora bias": {**_CONV1D, "lora_bias": True},
    "bias": {**_CONV1D, "bias": "lora_only"},
}
HEAD_WITH_BIAS: dict[str, Feature] = {
    "lora": {"target_modules": ["lm_head"]},
    "dora": {"target_modules": ["lm_head", "dense"], "use_dora": True},
    "bias": {"target_modules": ["lm_head"], "bias": "lora_only"},
    "whole": {"target_modules": ["fc1"], "modules_to_save": ["lm_head"]},
}
ENDS: dict[str, Feature] = {
    "lora": {"target_modules": ["embed_tokens", "lm_head"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}
FUSED: dict[str, Feature] = {
    "dora": {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    "lora bias": {"target_modules": ["qkv_proj", "gate_up_proj"], "lora_bias": True},
}
FAMILIES: dict[str, dict[str, Feature]] = {
    "llama": LLAMA,
    "gemma2-softcap-window": TIED,
    "gemma3-window": TIED,
    "cohere": TIED,
    "qwen2": BIASES,
    "gpt2-conv1d": CONV1D,
    "phi": HEAD_WITH_BIAS,
    "phi3-fused": FUSED,
    "granite": ENDS,
    "exaone4-window": ENDS,
}


@dataclass
class World:
    """A base, adapters of PEFT on it, and the same adapters in an arena."""

    base: BaseModel
    plain: PreTrainedModel
    tuned: list[PeftModel]
    arena: Arena
    rows: list[tuple[int, int]]

    def serve(
        self, sequences: Sequence[Sequence[int]], *, with_adapters: bool = True
    ) -> list[Tensor]:
        """Logits of a base row, one row of each adapter, and another base row."""
        builder = LoraBatchBuilder(self.arena, self.base.device) if with_adapters else None
        adapters = [(-1, 0), *self.rows, (-1, 0)]
        return paged_logits(self.base, sequences, builder=builder, adapters=adapters)

    def sequences(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        lengths = [19 + 5 * index % 13 for index in range(len(self.rows) + 2)]
        return [
            [*TOKENS, *torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()]
            for length in lengths
        ]


def make_world(tmp_path: Path, family: str, features: Sequence[Feature]) -> World:
    model = save_family(tmp_path / "base", *SERVED[family])
    draw_biases(model)
    plain = load_plain(model)
    tuned = [
        tune(model, tmp_path / str(index), feature, seed=index)
        for index, feature in enumerate(features)
    ]
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    arena, rows = place(base, plain, tuned, tmp_path)
    return World(base, plain, tuned, arena, rows)


def draw_biases(model: Path) -> None:
    """Transformers begins with biases of zero, with which a mistake about them changes nothing."""
    loaded = load_plain(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if name.endswith("bias"):
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    loaded.save_pretrained(model)


def load_plain(model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager"
    )
    return loaded.eval()


def tune(model: Path, path: Path, feature: Feature, *, seed: int) -> PeftModel:
    """An adapter of random values, saved and loaded by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its remarks on tied and saved embeddings
        return _tune(model, path, feature, seed=seed)


def _tune(model: Path, path: Path, feature: Feature, *, seed: int) -> PeftModel:
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **feature})
    fresh = get_peft_model(load_plain(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                is_new = "lora_" in name and "magnitude" not in name
                parameter.copy_(noise if is_new else parameter + noise)
    fresh.save_pretrained(path)
    return PeftModel.from_pretrained(load_plain(model), path).eval()


def place(
    base: BaseModel, plain: PreTrainedModel, tuned: Sequence[PeftModel], blocks: Path
) -> tuple[Arena, list[tuple[int, int]]]:
    """Bring adapters to the arena the way the engine does."""
    arena = Arena(base.layout, 8 * MIB, base.dtype, base.device)
    base.attach_arena(arena)
    prepare = BlockPreparation(base.layout, base.extended)
    host = HostCache(base.layout, 8 * MIB, base.dtype, prepare=prepare)
    rows = []
    for index, model in enumerate(tuned):
        key, path = AdapterKey("acme", f"sha256:{index}"), blocks / f"{index}.block"
        write_peft_block(model, plain, path, key=key, layout=base.layout)
        block = host.read(key, path)
        assert block is not None
        placement = arena.place(key, block.num_elements, block.table, block.extras)
        assert placement is not None
        arena.copy_into(placement, block)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
    return arena, rows


def dense_logits(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_feature_equals_peft_in_one_mixed_batch(family: str, tmp_path: Path) -> None:
    features = FAMILIES[family]
    world = make_world(tmp_path, family, list(features.values()))
    sequences = world.sequences()

    logits = world.serve(sequences)

    for name, model, tokens, ours in zip(
        features, world.tuned, sequences[1:-1], logits[1:-1], strict=True
    ):
        expected, plain = dense_logits(model, tokens), dense_logits(world.plain, tokens)
        assert (expected - plain).abs().max() > 100 * TOLERANCE, f"{name} must have an effect"
        assert (ours - expected).abs().max() < TOLERANCE, name
    unadapted = world.serve(sequences, with_adapters=False)
    for index in (0, -1):
        assert torch.equal(logits[index], unadapted[index]), "base rows are the base's, bit by bit"
