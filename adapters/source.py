"""The source information of a block, from which the adapter's original files are restored.

It holds the configuration's fields, and per tensor its name, type, shape, position and order in the
block. It holds nothing else about the files: equal digests must give equal blocks, byte for byte,
because both are stored under one key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .arrangement import Arrangement, Order, PlacedTensor, Region
from .bound import Binding
from .errors import ObjectCorrupt
from .expert_names import with_expert, without_expert
from .layout import SliceKind
from .peft_config import PeftConfig
from .tensor_names import PREFIX, parse_tensor_name


class SourceTensor(NamedTuple):
    """One tensor of the owner's file."""

    name: str
    dtype: str
    """`F32`, `F16` or `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """In elements, from the block's start; of its matrix, if it fills a region of one."""
    arrangement: Arrangement

    @property
    def num_elements(self) -> int:
        """Of the tensor, or of the whole matrix if it fills a region of one."""
        region = self.arrangement.region
        return math.prod(self.shape if region is None else region.shape)


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
        "tensors": list(_grouped(entry for entry in placed if not entry.is_copy)),
    }


def _grouped(placed: Iterable[PlacedTensor]) -> Iterator[list[Any]]:
    """One entry per tensor; one for all experts whose tensors differ in their number only.

    An adapter of a large base has several 10,000 tensors of experts.
    """
    groups: dict[str, tuple[list[Any], list[int]]] = {}
    for entry in placed:
        name = entry.tensor.name.removeprefix(PREFIX)
        arrangement = entry.arrangement
        fields: list[Any] = [
            entry.tensor.dtype,
            list(entry.tensor.shape),
            entry.offset,
            arrangement.order,
            arrangement.num_experts,
            list(arrangement.rows),
        ]
        if arrangement.region is None:
            yield [name, *fields]
            continue
        shape, expert, *start = arrangement.region
        if expert is None:
            yield [name, *fields, [list(shape), None, *start]]
            continue
        name = without_expert(name)
        experts: list[int] = []
        fields += [[list(shape), experts, *start]]
        _, experts = groups.setdefault(json.dumps([name, *fields]), ([name, *fields], experts))
        experts.append(expert)
    for group, experts in groups.values():
        experts.sort()
        yield group


def parse_source(source: Mapping[str, Any]) -> Source:
    """Raises ObjectCorrupt if this is not a result of `describe_source`."""
    try:
        tensors = tuple(tensor for entry in source["tensors"] for tensor in _tensors_of(*entry))
        return Source(dict(source["config"]), tensors)
    except (ValueError, KeyError, TypeError) as exc:
        raise ObjectCorrupt("the block does not say which files it was made from") from exc


def _tensors_of(
    name: str,
    dtype: str,
    shape: list[int],
    offset: int,
    order: str,
    num_experts: int,
    rows: list[int],
    region: Sequence[Any] | None = None,
) -> Iterator[SourceTensor]:
    """The tensors of one entry."""
    arrangement = Arrangement(Order(order), int(num_experts), tuple(map(int, rows)))
    for expert, part in _regions(region):
        yield SourceTensor(
            PREFIX + (name if expert is None else with_expert(name, expert)),
            str(dtype),
            tuple(map(int, shape)),
            int(offset),
            arrangement._replace(region=part),
        )


def _regions(region: Sequence[Any] | None) -> Iterator[tuple[int | None, Region | None]]:
    if region is None:
        yield None, None
        return
    (count, rank, width), experts, row, column, step = region
    for expert in [None] if experts is None else map(int, experts):
        shape = (int(count), int(rank), int(width))
        yield expert, Region(shape, expert, int(row), int(column), int(step))


def _peft_fields(config: PeftConfig) -> dict[str, object]:
    """The fields that the digest covers, without the base's name."""
    fields = {**config.to_peft(), "base_model_name_or_path": None}
    return {"task_type": "CAUSAL_LM", **fields, "inference_mode": True}


def _target_modules(binding: Binding) -> list[str]:
    """The modules that carry LoRA: PEFT loads no others. Of separate experts the last names."""
    modules = [
        part.module
        for part in binding.slices
        if not part.is_parameter and part.layer.kind is not SliceKind.EXPERTS
    ]
    experts = {
        parse_tensor_name(matrix.tensor.name).module.rpartition(".")[2]
        for part in binding.slices
        for matrix in part.matrices
        if matrix.arrangement.region is not None
    }
    return modules + sorted(experts)
