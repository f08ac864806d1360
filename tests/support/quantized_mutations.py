"""Damages quantized checkpoints: their files, tensors and settings. Some mutations are harmless."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.quantized_checkpoints import WEIGHTS

Tensors = dict[str, Tensor]
NUMBERS: tuple[Any, ...] = (None, -4, -1, 0, 1, 3, 5, 7, 16, 2**31, 2**62, 1.5, "4", [4], {}, True)
SETTINGS = (
    *("bits", "group_size", "quant_method", "checkpoint_format", "version", "w_bit"),
    *("weight_block_size", "config_groups", "q_group_size"),
)
WORDS = ("gptq", "awq", "marlin", "gptq_v2", "gemv", "", "\x00", "hqq", None, 7)


def mutate(folder: Path, draw: random.Random) -> str:
    """Damage the checkpoint in this folder in one way, whose name is returned."""
    way = draw.choice(WAYS)
    way(folder, draw)
    return way.__name__


def _truncate(folder: Path, draw: random.Random) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: draw.randrange(len(content))])


def _flip_header_bytes(folder: Path, draw: random.Random) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(draw.randint(1, 4)):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)
    (folder / WEIGHTS).write_bytes(bytes(content))


def _flip_value_bytes(folder: Path, draw: random.Random) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    for _ in range(draw.randint(1, 50)):
        content[draw.randrange(start, len(content))] = draw.randrange(256)
    (folder / WEIGHTS).write_bytes(bytes(content))


def _change_setting(folder: Path, draw: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    name = draw.choice([*settings, *SETTINGS])
    values = [*NUMBERS, *WORDS, [draw.choice(NUMBERS), draw.choice(NUMBERS)]]
    settings[name] = draw.choice(values)
    (folder / "config.json").write_text(json.dumps(config))


def _change_settings_whole(folder: Path, draw: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = draw.choice([None, {}, [], "gptq", 4, {"quant_method": "awq"}])
    (folder / "config.json").write_text(json.dumps(config))


def _on_tensors(
    change: Callable[[Tensors, str, random.Random], object],
) -> Callable[[Path, random.Random], None]:
    """A mutation of one tensor, drawn from all."""

    def way(folder: Path, draw: random.Random) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors, draw.choice(sorted(tensors)), draw)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / WEIGHTS)

    way.__name__ = change.__name__
    return way


def _remove(tensors: Tensors, name: str, _draw: random.Random) -> None:
    del tensors[name]


def _rename(tensors: Tensors, name: str, draw: random.Random) -> None:
    ends = [other.rpartition(".")[2] for other in tensors]
    ends += ["weight", "qweight", "weight_packed", "weight_scale", "scales", "SCB", "g_idx"]
    tensors[f"{name.rpartition('.')[0]}.{draw.choice(ends)}"] = tensors.pop(name).clone()


def _swap_sizes(tensors: Tensors, name: str, _draw: random.Random) -> None:
    tensors[name] = tensors[name].reshape(tuple(reversed(tensors[name].shape)))


def _reshape(tensors: Tensors, name: str, draw: random.Random) -> None:
    tensor = tensors[name]
    sizes = [size for size in range(1, tensor.numel() + 1) if tensor.numel() % size == 0] or [1]
    rows = draw.choice(sizes)
    tensors[name] = tensor.reshape(draw.choice([(-1,), (rows, -1), (1, rows, -1)]))


def _cut(tensors: Tensors, name: str, draw: random.Random) -> None:
    tensor = tensors[name].flatten()
    tensors[name] = tensor[: draw.randrange(tensor.numel() + 1)].clone()


def _cast(tensors: Tensors, name: str, draw: random.Random) -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8]
    kinds += [torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn]
    tensors[name] = tensors[name].float().to(draw.choice(kinds))


def _reinterpret(tensors: Tensors, name: str, draw: random.Random) -> None:
    kinds = {1: [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool]}
    kinds |= {2: [torch.float16, torch.bfloat16, torch.int16], 4: [torch.float32, torch.int32]}
    kinds |= {8: [torch.int64, torch.float64]}
    tensor = tensors[name]
    tensors[name] = tensor.view(draw.choice(kinds[tensor.element_size()]))


def _poison(tensors: Tensors, name: str, draw: random.Random) -> None:
    flat = tensors[name].flatten()
    if flat.numel() == 0:
        return
    if flat.dtype.is_floating_point:
        poison: Any = draw.choice([float("nan"), float("inf"), -1e30, 0.0, 1e-40])
    else:
        poison = draw.choice([-(2**31), -1, 2**31 - 1, 10**6, 0, 127])
        limits = (0, 1) if flat.dtype is torch.bool else _limits(flat.dtype)
        poison = min(max(poison, limits[0]), limits[1])
    flat[draw.randrange(flat.numel())] = poison
    tensors[name] = flat.view(tensors[name].shape)


def _edit_state(folder: Path, draw: random.Random) -> None:
    """bitsandbytes' JSON, or another setting where there is none."""
    tensors = load_file(folder / WEIGHTS)
    name = next((name for name in sorted(tensors) if "quant_state" in name), None)
    if name is None:
        _change_setting(folder, draw)
        return
    state = json.loads(tensors[name].numpy().tobytes())
    key = draw.choice(sorted(state))
    state[key] = draw.choice([*NUMBERS, [1 << 40, 1 << 40], [64], [0, 64], [-64, -96], dict(state)])
    content = json.dumps(state).encode() if draw.random() < 0.9 else b"{" * 2000
    tensors[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


WAYS: tuple[Callable[[Path, random.Random], None], ...] = (
    _truncate,
    _flip_header_bytes,
    _flip_value_bytes,
    _change_setting,
    _change_settings_whole,
    _edit_state,
    *map(
        _on_tensors,
        (_remove, _rename, _swap_sizes, _reshape, _cut, _cast, _reinterpret, _poison),
    ),
)
