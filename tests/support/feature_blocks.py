"""Blocks made directly from a live PeftModel, without intake.

It walks PEFT's own wrappers instead of its files, so it shares nothing with the code that reads
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from loraplex.adapters.block import BlockPlan, Extra, ExtraKind, write_block_header
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, SliceKind

NAME = "default"
PREFIX = "base_model.model."


Extras = dict[ExtraKind, tuple[Tensor, tuple[int, ...]]]
"""Values, and the token ids of TOKEN_ROWS."""


@dataclass(frozen=True)
class Part:
    """What an adapter holds for one slice: A, B (none if both are None) and extras."""

    a: Tensor | None
    b: Tensor | None
    scale: float
    auxiliary: Extras


def write_peft_block(
    model: PeftModel, base: nn.Module, path: Path, *, key: AdapterKey, layout: BaseLayout
) -> None:
    """Write the active adapter as a block in fp32. `base`: the model it was made for, untouched."""
    parts = {layout.slice_index[name]: part for name, part in adapted_parts(model, base)}
    ranks = {i: part.a.shape[0] for i, part in parts.items() if part.a is not None}
    auxiliary = [
        (Extra(i, kind, tuple(values.shape), token_ids), values)
        for i, part in parts.items()
        for kind, (values, token_ids) in part.auxiliary.items()
    ]
    plan = BlockPlan(layout, ranks, tuple(extra for extra, _ in auxiliary))
    payload = torch.zeros(plan.num_elements)
    for index in ranks:
        part = parts[index]
        assert part.a is not None
        assert part.b is not None
        by_token = layout.slices[index].kind is SliceKind.EMBEDDING
        matrices = (part.a.T if by_token else part.a, part.b.T)
        for offset, matrix in zip(plan.table[index, :2].tolist(), matrices, strict=True):
            payload[offset : offset + matrix.numel()] = matrix.flatten()
    for placed, (_, values) in zip(plan.placed_auxiliary, auxiliary, strict=True):
        payload[placed.offset : placed.offset + values.numel()] = values.flatten()
    with path.open("wb") as file:
        write_block_header(
            file,
            base_id=layout.base_id,
            digest=key.digest,
            dtype="F32",
            scales={i: parts[i].scale for i in ranks},
            plan=plan,
        )
        file.write(payload.numpy().tobytes())


def adapted_parts(model: PeftModel, base: nn.Module) -> Iterator[tuple[str, Part]]:
    """Module name in the base and what the adapter holds for it."""
    original = dict(base.named_modules())
    for path, module in model.named_modules():
        name = path.removeprefix(PREFIX)
        if isinstance(module, ModulesToSaveWrapper) and NAME in module.modules_to_save:
            saved = module.modules_to_save[NAME]
            auxiliary: Extras = {ExtraKind.MATRIX: (saved.weight.detach(), ())}
            if getattr(saved, "bias", None) is not None:
                auxiliary[ExtraKind.BIAS] = (saved.bias.detach(), ())
            yield name, Part(None, None, 1.0, auxiliary)
        elif isinstance(module, TrainableTokensWrapper):
            yield name, _token_rows(module)
        elif isinstance(module, LoraLayer):
            yield name, _lora_part(module, original[name])
        elif isinstance(module, nn.Linear) and (
            auxiliary := _trained_bias(module, original.get(name))
        ):
            yield name, Part(None, None, 1.0, auxiliary)


def _token_rows(module: TrainableTokensWrapper) -> Part:
    token_ids = module.token_adapter.token_indices[NAME]
    order = sorted(range(len(token_ids)), key=token_ids.__getitem__)
    rows = module.token_adapter.trainable_tokens_delta[NAME].detach()[order]
    ids = tuple(token_ids[position] for position in order)
    return Part(None, None, 1.0, {ExtraKind.TOKEN_ROWS: (rows, ids)})


def _lora_part(module: LoraLayer, original: nn.Module) -> Part:
    auxiliary: Extras = {}
    if NAME in module.lora_magnitude_vector:
        auxiliary[ExtraKind.MAGNITUDE] = (module.lora_magnitude_vector[NAME].weight.detach(), ())
    if NAME in module.lora_embedding_A:
        a, b = module.lora_embedding_A[NAME].detach(), module.lora_embedding_B[NAME].detach()
        return Part(a, b, module.scaling[NAME], auxiliary)
    a, b = module.lora_A[NAME], module.lora_B[NAME]
    if b.bias is not None:
        auxiliary[ExtraKind.LORA_BIAS] = (b.bias.detach(), ())
    auxiliary.update(_trained_bias(module.get_base_layer(), original))
    return Part(a.weight.detach(), b.weight.detach(), module.scaling[NAME], auxiliary)


def _trained_bias(module: nn.Module, original: nn.Module | None) -> Extras:
    """The bias, if training has changed it. `original`: the base's module, if it is one of it."""
    if not isinstance(module, nn.Linear | Conv1D):
        return {}
    bias, before = module.bias, getattr(original, "bias", None)
    if bias is None or before is None or torch.equal(bias, before):
        return {}
    return {ExtraKind.BIAS: (bias.detach(), ())}
