"""Canonical blocks written from a live PEFT model, layer by layer, without its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loraplex.adapters.block import BlockPlan, write_block_header
from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, SliceKind

ADAPTER = "default"
_PREFIX = "base_model.model."
_WRAPPER = ".base_layer"
"""What PEFT puts around a module once for each of its parameters but one."""


def make_tuned(base: nn.Module, *, seed: int, scale: float = 0.2, **lora: Any) -> Any:
    """`base` under a random adapter of this LoraConfig: both A and B are drawn."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": [], **lora})
    tuned = get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return tuned


def adapted_layers(tuned: Any) -> dict[str, Any]:
    """Slice name to the PEFT layer that adapts it."""
    layers = {}
    for name, module in tuned.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        path = name.removeprefix(_PREFIX)
        while path.endswith(_WRAPPER):
            path = path.removesuffix(_WRAPPER)
        parameter = getattr(module, "parameter_name", "weight")
        layers[path if parameter == "weight" else f"{path}.{parameter}"] = module
    return layers


def expert_matrices(layer: Any) -> tuple[Tensor, Tensor]:
    """A `[experts, rank, in]` and B transposed `[experts, rank, out]` of a PEFT layer.

    PEFT lays A out expert by expert and B rank by rank. Experts are 1 for an ordinary layer.
    """
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    rank, num_experts = layer.r[ADAPTER], getattr(layer, "num_experts", 1)
    by_expert = b.reshape(len(b), rank, num_experts).permute(2, 1, 0)
    return a.detach().reshape(num_experts, rank, -1), by_expert.detach()


def write_peft_block(path: Path, tuned: Any, layout: BaseLayout) -> AdapterKey:
    """Write the adapter's block in fp32; every layer of it must be a slice of the layout."""
    layers = {layout.slice_index[name]: layer for name, layer in adapted_layers(tuned).items()}
    plan = BlockPlan(layout, {index: layer.r[ADAPTER] for index, layer in layers.items()})
    payload = torch.zeros(plan.num_elements)
    for index, layer in layers.items():
        part = layout.slices[index]
        assert (part.kind is SliceKind.EXPERTS) == (getattr(layer, "num_experts", 1) > 1)
        for offset, matrices in zip(
            plan.table[index, :2].tolist(), expert_matrices(layer), strict=True
        ):
            payload[offset : offset + matrices.numel()] = matrices.reshape(-1)
    key = AdapterKey("acme", f"sha256:{path.stem}")
    with path.open("wb") as file:
        write_block_header(
            file,
            base_id=layout.base_id,
            digest=key.digest,
            dtype="F32",
            scales={index: layer.scaling[ADAPTER] for index, layer in layers.items()},
            plan=plan,
        )
        file.write(payload.numpy().tobytes())
    return key
