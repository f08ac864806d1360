"""The source information of a block, from which the adapter's original files are restored.

It holds the configuration's fields, and per tensor its name, type, shape, position and order in the
block. It holds nothing else about the files: equal digests must give equal blocks, byte for byte,
because both are stored under one key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .arrangement import Arrangement, Order, PlacedTensor
from .bound import Binding
from .errors import ObjectCorrupt
from .layout import SliceKind
from .peft_config import PeftConfig
from .tensor_names import PREFIX


class SourceTensor(NamedTuple):
    """One tensor of the owner's file."""

    name: str
    dtype: str
    """`F32`, `F16` or `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """In elements, from the block's start."""
    arrangement: Arrangement


class Source(NamedTuple):
    """Both files of an adapter."""

    config: dict[str, Any]
    """The fields of adapter_config.json."""
    tensors: tuple[SourceTensor, ...]


def describe_source(
    binding: Binding, config: PeftConfig, placed: Sequence[PlacedTensor]
) -> dict[str, Any]:
    """The JSON object for the block's header."""
    return {
        "config": {**_peft_fields(config), "target_modules": _target_modules(binding)},
        "tensors": [
            [
                entry.tensor.name.removeprefix(PREFIX),
                entry.tensor.dtype,
                list(entry.tensor.shape),
                entry.offset,
                entry.arrangement.order,
                entry.arrangement.num_experts,
                list(entry.arrangement.rows),
            ]
            for entry in placed
            if not entry.is_copy
        ],
    }


def parse_source(source: Mapping[str, Any]) -> Source:
    """Raises ObjectCorrupt if this is not a result of `describe_source`."""
    try:
        tensors = tuple(
            SourceTensor(
                f"{PREFIX}{name}",
                str(dtype),
                tuple(map(int, shape)),
                int(offset),
                Arrangement(Order(order), int(num_experts), tuple(map(int, rows))),
            )
            for name, dtype, shape, offset, order, num_experts, rows in source["tensors"]
        )
        return Source(dict(source["config"]), tensors)
    except (ValueError, KeyError, TypeError) as exc:
        raise ObjectCorrupt("the block does not say which files it was made from") from exc


def _peft_fields(config: PeftConfig) -> dict[str, object]:
    """The fields that the digest covers, without the base's name."""
    fields = {**config.to_peft(), "base_model_name_or_path": None}
    return {**fields, "task_type": "CAUSAL_LM", "inference_mode": True}


def _target_modules(binding: Binding) -> list[str]:
    """The modules that carry LoRA: PEFT loads no others."""
    return [
        part.module
        for part in binding.slices
        if not part.is_parameter and part.layer.kind is not SliceKind.EXPERTS
    ]
