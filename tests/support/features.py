"""Adapters with every trainable PEFT feature, live in PEFT and served from an arena."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex.adapters.arena import Arena
from loraplex.adapters.extents import Placement
from loraplex.adapters.host_cache import HostBlock, HostCache
from loraplex.adapters.identity import AdapterKey
from loraplex.engine.config import EngineConfig, Quantization
from loraplex.engine.model.base_model import BaseModel
from loraplex.engine.model.block_preparation import BlockPreparation
from loraplex.engine.model.whole_base import load_base_model
from loraplex.kernels.int8_linear import int8_linear_reference
from loraplex.kernels.linear_packing import prefers_bytes
from loraplex.kernels.lora_batch import LoraBatchBuilder
from loraplex.kernels.quantize import WeightFormat
from support.families import SERVED, VOCAB_SIZE, save_family
from support.feature_blocks import write_peft_block
from support.models import save_without_card
from support.paged import BLOCK_SIZE, paged_logits
from support.quantized import rounded_weight
from support.quantized_checkpoints import Format, write_checkpoint

MIB = 1 << 20
TOKENS = [3, 17, 5, 90, 127]
"""What every sequence begins with: features that change single tokens change these."""

Feature = dict[str, Any]
"""Arguments of LoraConfig."""


@dataclass
class World:
    """A base, adapters of PEFT on it, and the same adapters in an arena."""

    base: BaseModel
    plain: PreTrainedModel
    tuned: list[PeftModel]
    host: HostCache
    arena: Arena
    rows: list[tuple[int, int]]
    """Of each adapter: row and generation."""
    path: Path
    placements: dict[int, Placement] = field(default_factory=dict)

    def read(self, index: int) -> HostBlock:
        """One adapter's block, prepared, in host memory."""
        key, path = AdapterKey("acme", f"sha256:{index}"), self.path / f"{index}.block"
        write_peft_block(self.tuned[index], self.plain, path, key=key, layout=self.base.layout)
        block = self.host.read(key, path)
        assert block is not None
        return block

    def publish(self, index: int) -> tuple[int, int]:
        """Bring one adapter to the arena the way the engine does; return row and generation."""
        block = self.read(index)
        placement = self.arena.place(
            block.key, block.num_elements, block.table, block.auxiliary, vocab_size=block.vocab_size
        )
        assert placement is not None
        self.arena.copy_into(placement, block)
        self.arena.publish(placement)
        self.host.remove(block.key)
        self.placements[placement.row] = placement
        return placement.row, placement.generation

    def remove(self, row: int) -> None:
        """Take an adapter off the arena the way the engine does."""
        placement = self.placements.pop(row)
        self.arena.retire(placement)
        self.arena.erase(placement)
        self.arena.free(placement)

    def serve(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        with_adapters: bool = True,
        block_size: int = BLOCK_SIZE,
    ) -> list[Tensor]:
        """Logits of a base row, one row of each adapter, and another base row."""
        builder = LoraBatchBuilder(self.arena, self.base.device) if with_adapters else None
        adapters = [(-1, 0), *self.rows, (-1, 0)]
        return paged_logits(
            self.base, sequences, builder=builder, adapters=adapters, block_size=block_size
        )

    def sequences(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        lengths = [19 + 5 * index % 13 for index in range(len(self.rows) + 2)]
        return [
            [*TOKENS, *torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()]
            for length in lengths
        ]


def make_world(
    tmp_path: Path,
    family: str,
    features: Sequence[Feature],
    *,
    weight_format: WeightFormat | None = None,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
    end_format: WeightFormat | None = None,
    form: Format | None = None,
    ends: Sequence[str] = (),
    dtype: str = "float32",
) -> World:
    """weight_format: the base is quantized, with this group size and without these layers, and
    PEFT's own base multiplies as it does, in plain PyTorch; end_format: likewise the embedding and
    the output head. form: the base is served from a checkpoint of this format, of the `ends` too,
    and PEFT's own base has the values that its codes stand for."""
    model = save_family(tmp_path / "base", *SERVED[family])
    change_weights(model, draw_bias)
    load = load_plain
    if weight_format:
        rounding = partial(_round_to_codes, weight_format=weight_format, group_size=group_size)
        change_weights(model, partial(rounding, exclude=exclude))
        if not group_size:  # groups are never multiplied as bytes
            load = partial(load_quantized, weight_format=weight_format)
    if end_format:
        change_weights(model, partial(_round_ends, weight_format=end_format))
    served = write_checkpoint(model, tmp_path / "packed", form, ends=ends) if form else model
    tuned = [
        tune(model, tmp_path / str(index), feature, seed=index, load=load)
        for index, feature in enumerate(features)
    ]
    config = EngineConfig(
        str(served),
        device="cpu",
        quantization=Quantization(weight_format or "none"),
        quantization_group_size=group_size,
        quantization_exclude=tuple(exclude),
        embedding_quantization=Quantization(end_format or "none"),
        dtype=dtype,
    )
    base = load_base_model(config)
    world = World(base, load(model), tuned, *make_memory(base), rows=[], path=tmp_path)
    for index in range(len(tuned)):
        world.rows.append(world.publish(index))
    return world


def make_memory(base: BaseModel) -> tuple[HostCache, Arena]:
    """The host cache and the arena, connected to the base as the engine connects them."""
    prepare = BlockPreparation(base.layout, base.extended, rest=lambda _seconds: None)
    arena = Arena(base.layout, 8 * MIB, base.dtype, base.device)
    base.attach_arena(arena)
    return HostCache(base.layout, 8 * MIB, base.dtype, prepare=prepare), arena


def change_weights(model: Path, change: Callable[[str, Tensor], None]) -> None:
    """Change a saved model's parameters in place."""
    loaded = load_plain(model)
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            change(name, parameter)
    loaded.save_pretrained(model)


def draw_bias(name: str, parameter: Tensor) -> None:
    """Transformers begins with biases of zero, with which a mistake about them changes nothing."""
    if name.endswith("bias"):
        generator = torch.Generator().manual_seed(len(name))
        parameter += torch.randn(parameter.shape, generator=generator) * 0.3


def _round_to_codes(
    name: str,
    parameter: Tensor,
    *,
    weight_format: WeightFormat,
    group_size: int | None,
    exclude: Sequence[str],
) -> None:
    """Leave of the decoder's matrices what codes can hold: quantizing changes nothing more."""
    path = name.removesuffix(".weight")
    if path.endswith("_proj") and not any(fnmatchcase(path, glob) for glob in exclude):
        parameter.copy_(rounded_weight(parameter, weight_format, group_size))


def _round_ends(name: str, parameter: Tensor, *, weight_format: WeightFormat) -> None:
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        parameter.copy_(rounded_weight(parameter, weight_format))


def load_plain(model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager"
    )
    return loaded.eval()


def load_quantized(model: Path, *, weight_format: WeightFormat) -> PreTrainedModel:
    """The model, its decoder's linear layers in the arithmetic of a quantized base on the CPU."""
    loaded = load_plain(model)
    if weight_format is not WeightFormat.INT8 or not prefers_bytes():
        return loaded  # activations are not quantized
    for name, module in loaded.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("_proj"):
            weights = {"weight": module.weight, "bias": module.bias}
            module.__dict__["forward"] = partial(int8_linear_reference, **weights)
    return loaded


def tune(
    model: Path,
    path: Path,
    feature: Feature,
    *,
    seed: int,
    load: Callable[[Path], PreTrainedModel] = load_plain,
) -> PeftModel:
    """An adapter of random values, saved and loaded by PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its remarks on tied and saved embeddings
        _save(model, path, feature, seed)
        return PeftModel.from_pretrained(load(model), path).eval()


def _save(model: Path, path: Path, feature: Feature, seed: int) -> None:
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **feature})
    fresh = get_peft_model(load_plain(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                is_new = "lora_" in name and "magnitude" not in name
                parameter.copy_(noise if is_new else parameter + noise)
    save_without_card(fresh, path)


def dense_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
