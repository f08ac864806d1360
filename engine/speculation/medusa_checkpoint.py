"""Medusa heads on disk: `config.json` and safetensors with the original tensor names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import InvalidParameter
from .medusa_heads import MedusaHeads, assembled, named_tensors, tensor_shapes

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "medusa_lm_head.safetensors"
_PICKLES = ("*.pt", "*.pth", "*.bin")
_MAX_HEADS = 64
_MAX_LAYERS = 16


def save_heads(heads: MedusaHeads, path: Path, *, base_id: str) -> None:
    """Write the heads, and which base they were trained for, into the folder `path`."""
    path.mkdir(parents=True, exist_ok=True)
    num_heads, vocab_size, hidden_size = heads.projections.shape
    config = {
        "base_id": base_id,
        "hidden_size": hidden_size,
        "medusa_num_heads": num_heads,
        "medusa_num_layers": len(heads.weights),
        "vocab_size": vocab_size,
    }
    (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(named_tensors(heads), path / WEIGHTS_NAME)


def load_heads(
    path: Path, *, hidden_size: int, vocab_size: int, base_id: str, dtype: torch.dtype
) -> MedusaHeads:
    """The heads in the folder `path`, for a base with these sizes, on the CPU in `dtype`.

    Raises InvalidParameter if they cannot be read or are another base's.
    """
    config = _read_config(path)
    _check_base(path, config, hidden_size=hidden_size, vocab_size=vocab_size, base_id=base_id)
    num_heads = _count(path, config, "medusa_num_heads", _MAX_HEADS)
    num_layers = _count(path, config, "medusa_num_layers", _MAX_LAYERS)
    shapes = dict(
        tensor_shapes(
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
        )
    )
    tensors = _read_tensors(path)
    _check_tensors(path, tensors, shapes)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return assembled(tensors, num_heads=num_heads, num_layers=num_layers).requires_grad_(False)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        _refuse(path, f"{CONFIG_NAME} cannot be read: {exc}")
    if not isinstance(config, dict):
        _refuse(path, f"{CONFIG_NAME} is no object")
    return config


def _check_base(
    path: Path, config: Mapping[str, Any], *, hidden_size: int, vocab_size: int, base_id: str
) -> None:
    """The checkpoint's data about its base, which original checkpoints lack."""
    for name, value in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if config.get(name, value) != value:
            _refuse(path, f"its {name} is {config[name]}, the base's {value}")
    if config.get("base_id", base_id) != base_id:
        _refuse(path, "its heads were trained for another base")


def _count(path: Path, config: Mapping[str, Any], name: str, largest: int) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= largest:
        _refuse(path, f"{name} is {value!r}, not a number from 1 to {largest}")
    return value


def _read_tensors(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            _refuse(path, f"{pickles[0]} is a pickle, which is not read: save it as safetensors")
        _refuse(path, "there is no safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as exc:
            _refuse(path, f"{file.name} cannot be read: {exc}")
    return tensors


def _check_tensors(
    path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if missing := shapes.keys() - tensors.keys():
        _refuse(path, f"{min(missing)} is missing")
    if unknown := tensors.keys() - shapes.keys():
        _refuse(path, f"{min(unknown)} is no tensor of such heads")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            _refuse(path, f"{name} is {tensor.dtype} {list(tensor.shape)}, not {list(shape)}")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise InvalidParameter("speculation", f"medusa heads in {path}: {reason}")
