"""Safetensors files byte by byte, valid or not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def make_entry(shape: list[int], *, begin: int = 0, dtype: str = "F32") -> dict[str, Any]:
    size = math.prod(shape) * ITEM_BYTES[dtype]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


def make_file(header: bytes | Mapping[str, Any], payload: bytes = b"") -> bytes:
    """A file with this header, given as bytes or as the object to encode."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + payload


def make_tensors(tensors: Mapping[str, npt.NDArray[np.float32]]) -> bytes:
    """A well-formed file of float32 tensors."""
    header, payload = {}, b""
    for name, values in tensors.items():
        header[name] = make_entry(list(values.shape), begin=len(payload))
        payload += values.astype("<f4").tobytes()
    return make_file(header, payload)


def make_lora(
    modules: Mapping[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]],
) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors named as PEFT does, from module to (A, B)."""
    tensors = {}
    for module, (a, b) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    return tensors


def write_adapter(
    directory: Path, tensors: Mapping[str, npt.NDArray[np.float32]], **config: object
) -> Path:
    """An adapter's two files, without PEFT; the defaults are rank 2, alpha 4."""
    directory.mkdir(parents=True)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    (directory / "adapter_model.safetensors").write_bytes(make_tensors(tensors))
    return directory
