"""An adapter's change to the base: by its block's file, and by PEFT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from loraplex.adapters.block import NUMPY_DTYPES, BlockPlan, read_block_header
from loraplex.adapters.layout import BaseLayout, SliceKind
from loraplex.adapters.weights import to_float32


def deltas_of_block(path: Path, layout: BaseLayout) -> dict[str, npt.NDArray[np.float64]]:
    """scale·B·A by slice: `[out, in]`; of experts `[experts, out, in]`."""
    header = read_block_header(path)
    assert header.base_id == layout.base_id
    data = np.fromfile(path, NUMPY_DTYPES[header.dtype], offset=header.payload_offset)
    payload = to_float32(data, header.dtype).astype(np.float64)
    table = BlockPlan(layout, header.ranks, header.auxiliary).table
    deltas = {}
    for index, rank in header.ranks.items():
        part = layout.slices[index]
        a_offset, b_offset, _ = table[index]
        num_rows = rank * part.num_experts
        a = payload[a_offset : a_offset + num_rows * part.in_features]
        b = payload[b_offset : b_offset + num_rows * part.out_features].reshape(num_rows, -1)
        counts, scales = zip(
            *header.row_scales.get(index, ((num_rows, header.scales[index]),)), strict=True
        )
        b = (b * np.repeat(scales, counts)[:, None]).reshape(part.num_experts, rank, -1)
        delta = np.einsum("ero,eri->eoi", b, a.reshape(part.num_experts, rank, -1))
        deltas[part.name] = delta if part.kind is SliceKind.EXPERTS else delta[0]
    return deltas


def deltas_of_peft(base: Path, adapter: Path) -> dict[str, npt.NDArray[np.float64]]:
    """The change that PEFT itself would merge `[out, in]`, by module."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return {
        name: module.get_delta_weight("default").detach().double().numpy()
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, LoraLayer)
    }
