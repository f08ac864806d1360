"""Every "served" row of the published table, from PEFT's files to PEFT's logits."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.adapters.arena import Arena
from loraplex.adapters.examination import examine
from loraplex.adapters.formats import SERVED
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig
from loraplex.engine.model.base_model import BaseModel, load_base_model
from loraplex.engine.model.block_preparation import BlockPreparation
from loraplex.kernels.lora_batch import LoraBatchBuilder
from support.paged import paged_logits
from support.peft_features import (
    TRAINED_TOKENS,
    base_name,
    draw_trained_values,
    make_adapter,
    save_base,
)

TOLERANCE = 1e-4
MIB = 1 << 20


def rows_by_base() -> dict[str, list[str]]:
    rows: dict[str, list[str]] = defaultdict(list)
    for feature in SERVED:
        rows[base_name(feature.name)].append(feature.name)
    return rows


def load(model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager"
    )
    return loaded.eval()


def load_tuned(model: Path, folder: Path) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT remarks on biases and tied ends
        return PeftModel.from_pretrained(load(model), folder).eval()


def dense_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def publish(
    base: BaseModel, folders: list[Path], blocks: Path
) -> tuple[LoraBatchBuilder, list[tuple[int, int]]]:
    """Take adapters in and bring them to the arena; return each one's row and generation."""
    arena = Arena(base.layout, 8 * MIB, base.dtype, base.device)
    base.attach_arena(arena)
    prepare = BlockPreparation(base.layout, base.extended)
    host = HostCache(base.layout, 8 * MIB, base.dtype, prepare=prepare)
    rows = []
    for index, folder in enumerate(folders):
        path = blocks / f"{index}.block"
        report = examine(
            folder / "adapter_config.json",
            folder / "adapter_model.safetensors",
            path,
            layout=base.layout,
            serving_dtype="float32",
            max_full_matrix_bytes=MIB,
        )
        key = AdapterKey("acme", report.digest)
        block = host.read(key, path)
        assert block is not None
        placement = arena.place(key, block.num_elements, block.table, block.auxiliary)
        assert placement is not None
        arena.copy_into(placement, block)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
    return LoraBatchBuilder(arena, base.device), rows


@pytest.mark.parametrize("name", rows_by_base())
def test_all_served_features_equal_peft_in_one_mixed_batch(name: str, tmp_path: Path) -> None:
    model, features = save_base(name, tmp_path / "base"), rows_by_base()[name]
    folders = [tmp_path / feature for feature in features]
    for feature, folder in zip(features, folders, strict=True):
        make_adapter(feature, folder, load(model))
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    builder, rows = publish(base, folders, tmp_path)
    generator = torch.Generator().manual_seed(2)
    lengths = [17 + 3 * index % 11 for index in range(len(features) + 2)]
    sequences = [
        [*TRAINED_TOKENS, *torch.randint(base.vocab_size, (length,), generator=generator).tolist()]
        for length in lengths
    ]
    adapters = [(-1, 0), *rows, (-1, 0)]

    logits = paged_logits(base, sequences, builder=builder, adapters=adapters)

    plain = load(model)
    for index in (0, -1):
        assert (logits[index] - dense_logits(plain, sequences[index])).abs().max() < TOLERANCE
    for feature, folder, tokens, ours in zip(
        features, folders, sequences[1:-1], logits[1:-1], strict=True
    ):
        expected = dense_logits(load_tuned(model, folder), tokens)
        effect = (expected - dense_logits(plain, tokens)).abs().max()
        assert effect > 100 * TOLERANCE, f"{feature} must have an effect"
        assert (ours - expected).abs().max() < TOLERANCE, feature


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_a_copy_of_the_base_that_peft_adds_by_default_changes_nothing(tmp_path: Path) -> None:
    model = save_base("llama", tmp_path / "base")
    targets = ["q_proj", "embed_tokens", "lm_head"]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    trained = get_peft_model(load(model), config)
    draw_trained_values(trained, seed=5)
    trained.save_pretrained(tmp_path / "adapter")
    base = load_base_model(EngineConfig(str(model), device="cpu"))
    builder, [row] = publish(base, [tmp_path / "adapter"], tmp_path)
    tokens = list(range(20))
    ours = paged_logits(base, [tokens], builder=builder, adapters=[row])[0]
    assert (ours - dense_logits(trained.eval(), tokens)).abs().max() < TOLERANCE
