"""Every feature of PEFT that is served, in one mixed batch beside PEFT's own model."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loraplex.adapters.arena import Arena
from loraplex.adapters.examination import examine
from loraplex.adapters.formats import SERVED
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.block_preparation import BlockPreparation
from loraplex.kernels.lora_batch import LoraBatchBuilder
from support.features import dense_logits, load_plain
from support.paged import paged_logits
from support.peft_features import TRAINED_TOKENS, base_name, make_adapter, tuned_model

MIB = 1 << 20


class FeatureLogits(NamedTuple):
    """The logits of one sequence, `[tokens, vocabulary]` each."""

    served: Tensor
    by_peft: Tensor
    without: Tensor
    """The base's."""


def features_by_base() -> dict[str, list[str]]:
    """The rows of the published table, by the base that they can be trained on; without those of
    classifiers, whose answers are no logits of tokens, of activated LoRA, which acts on a part of
    the prompt (`test_activated_lora.py`), and of draft heads, which change no logits
    (`test_adapter_heads.py`)."""
    rows: dict[str, list[str]] = defaultdict(list)
    for feature in SERVED:
        if feature.name in {"classification", "activated_lora", "draft_head"}:
            continue
        rows[base_name(feature.name)].append(feature.name)
    return rows


def make_adapters(features: Sequence[str], plain: Path, folder: Path) -> dict[str, Path]:
    """An adapter of each feature on a dense base, by PEFT."""
    folders = {feature: folder / feature for feature in features}
    for feature, path in folders.items():
        make_adapter(feature, path, load_plain(plain))
    return folders


def mixed_batch(
    base: BaseModel,
    plain: Path,
    adapters: Mapping[str, Path],
    blocks: Path,
    *,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, FeatureLogits]]:
    """Serve a sequence of each adapter in one batch, between two of the base alone, which are
    yielded under no name. `plain`: the dense base, which PEFT computes in this dtype."""
    builder, rows = publish(base, list(adapters.values()), blocks)
    sequences = draw_sequences(base, len(adapters) + 2)
    of_rows = [(-1, 0), *rows, (-1, 0)]
    logits = paged_logits(base, sequences, builder=builder, adapters=of_rows)
    model = load_plain(plain).to(dtype)
    for name, tokens, served in zip(["", *adapters, ""], sequences, logits, strict=True):
        without = dense_logits(model, tokens)
        by_peft = without
        if name:
            by_peft = dense_logits(load_tuned(name, plain, adapters[name]).to(dtype), tokens)
        # Another adapter of the batch may have tokens that this one does not have.
        yield name, FeatureLogits(served[:, : by_peft.shape[1]], by_peft, without)


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
        placement = arena.place(
            key, block.num_elements, block.table, block.auxiliary, vocab_size=block.vocab_size
        )
        assert placement is not None
        arena.copy_into(placement, block)
        arena.publish(placement)
        rows.append((placement.row, placement.generation))
    return LoraBatchBuilder(arena, base.device), rows


def draw_sequences(base: BaseModel, count: int) -> list[list[int]]:
    """Sequences that have the tokens which adapters of single tokens change."""
    generator = torch.Generator().manual_seed(2)
    lengths = [17 + 3 * index % 11 for index in range(count)]
    return [
        [*TRAINED_TOKENS, *torch.randint(base.vocab_size, (length,), generator=generator).tolist()]
        for length in lengths
    ]


def load_tuned(feature: str, model: Path, folder: Path) -> nn.Module:
    """PEFT's model of the adapter of this row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT remarks on biases and tied ends
        tuned: nn.Module = tuned_model(feature, load_plain(model), folder).eval()
    return tuned
