"""An adapter's change to the base: by its block's file, and by PEFT."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from loraplex.adapters.block import NUMPY_DTYPES, BlockPlan, read_block_header
from loraplex.adapters.layout import BaseLayout
from loraplex.adapters.weights import to_float32


def deltas_of_block(path: Path, layout: BaseLayout) -> dict[str, npt.NDArray[np.float64]]:
    """scale·B·A `[out, in]` by module."""
    header = read_block_header(path)
    assert header.base_id == layout.base_id
    data = np.fromfile(path, NUMPY_DTYPES[header.dtype], offset=header.payload_offset)
    payload = to_float32(data, header.dtype).astype(np.float64)
    table = BlockPlan(layout, header.ranks, header.auxiliary).table
    deltas = {}
    for index, rank in header.ranks.items():
        part = layout.slices[index]
        a_offset, b_offset, _ = table[index]
        a = payload[a_offset : a_offset + rank * part.in_features].reshape(rank, -1)
        b = payload[b_offset : b_offset + rank * part.out_features].reshape(rank, -1)
        deltas[part.name] = header.scales[index] * (b.T @ a)
    return deltas


def deltas_of_peft(base: Path, adapter: Path) -> dict[str, npt.NDArray[np.float64]]:
    """The change that PEFT itself would merge `[out, in]`, by module."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return {
        name: module.get_delta_weight("default").detach().double().numpy()
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, LoraLayer)
    }
