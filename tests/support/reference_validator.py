"""An independent verdict on small adapters: whether an adapter is harmless.

The safetensors library parses, PEFT's own classes and functions read the configuration, PyTorch
multiplies. Restrictions that only the server has (duplicate keys, hostile names, size limits,
features that no batch can serve) are implemented here again, independently.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import safetensors
import safetensors.torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from torch import Tensor

from support.mutators import AdapterFiles

MAX_HEADER_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 100_000
DTYPES = {"F32", "F16", "BF16"}
ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
LITERAL = re.compile(r"\^?[A-Za-z0-9_.\-]+")
MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
UNSERVED_FIELDS = {
    *("layer_replication", "arrow_config", "kasa_config"),
    *("auto_map", "megatron_config", "runtime_config"),
}
INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")


class Harmful(Exception):
    """Must be refused."""


@dataclass(frozen=True)
class Harmless:
    """What such an adapter does."""

    deltas: dict[str, Tensor]
    """Module to scale·B·A `[out, in]`, in double precision."""


def judge(files: AdapterFiles, shapes: Mapping[str, tuple[int, int]]) -> Harmless | None:
    """What the adapter does to modules of these (in, out) features; None: it must be refused."""
    try:
        config = _read_config(files.config)
        return Harmless(_deltas(_read_tensors(files.weights), config, shapes))
    except Harmful:
        return None


def _require(condition: object) -> None:
    if not condition:
        raise Harmful


# --- the weights ----------------------------------------------------------------------------------


def _read_tensors(data: bytes) -> dict[str, Tensor]:
    try:
        found: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as exc:
        raise Harmful from exc
    length = int.from_bytes(data[:8], "little")
    _require(length <= MAX_HEADER_BYTES and 0 < len(found) <= MAX_TENSORS)
    _require(data[8:9] == b"{")
    header = _strict_object(data[8 : 8 + length])
    header.pop("__metadata__", None)
    _require(all(entry.keys() == ENTRY_FIELDS for entry in header.values()))
    for name, entry in found:
        _require(NAME.fullmatch(name) and entry["dtype"] in DTYPES)
        _require(len(entry["shape"]) <= 3 and all(entry["shape"]))
    tensors: dict[str, Tensor] = safetensors.torch.load(data)
    return tensors


def _strict_object(data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _require(len({key for key, _ in pairs}) == len(pairs))
        return dict(pairs)

    def no_number(_: str) -> None:
        raise Harmful

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_number)
    except (ValueError, RecursionError) as exc:
        raise Harmful from exc
    _require(isinstance(value, dict))
    _require(_is_finite(value))
    fields_of_object: dict[str, Any] = value
    return fields_of_object


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


# --- the configuration ----------------------------------------------------------------------------


def _read_config(data: bytes) -> LoraConfig:
    _require(len(data) <= MAX_CONFIG_BYTES)
    given = _strict_object(data)
    _require(given.get("peft_type") == "LORA")
    known = {field.name for field in fields(LoraConfig)} | {"megatron_core", "megatron_config"}
    unknown = given.keys() - known - {"auto_map"}
    _require(all(given[name] is None or given[name] is False for name in unknown))
    _require(not any(given.get(name) for name in UNSERVED_FIELDS))
    _require(given.get("auto_mapping") is None)
    _require(given.get("megatron_core") in (None, "megatron.core"))
    _require(given.get("task_type") in (None, "CAUSAL_LM"))
    _require(any(given.get("init_lora_weights", True) is value for value in INITIALIZATIONS))
    _require(_is_invocation(given.get("alora_invocation_tokens")))
    _require(_is_rank(given.get("r")) and _is_alpha(given.get("lora_alpha")))
    _require(isinstance(given.get("use_rslora"), bool | None))
    _check_pattern(given.get("rank_pattern"), _is_rank)
    _check_pattern(given.get("alpha_pattern"), _is_alpha)
    targets = given.get("target_modules")
    if targets is not None and not isinstance(targets, str):
        _require(isinstance(targets, list) and all(isinstance(name, str) for name in targets))
    _require(isinstance(given.get("base_model_name_or_path"), str | None))
    kept = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    return LoraConfig(**{name: given[name] for name in kept if given.get(name) is not None})


def _is_invocation(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, list) or not 0 < len(value) <= 256:
        return False
    return all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= 4096


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e6  # type: ignore[operator]


def _check_pattern(pattern: object, is_value: Any) -> None:
    if pattern is None:
        return
    _require(isinstance(pattern, dict) and len(pattern) <= 4096)
    assert isinstance(pattern, dict)
    _require(all(LITERAL.fullmatch(key) and is_value(value) for key, value in pattern.items()))


# --- together -------------------------------------------------------------------------------------


def _deltas(
    tensors: Mapping[str, Tensor], config: LoraConfig, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        matrix = MATRIX.fullmatch(name)
        _require(matrix and matrix[1] in shapes)
        assert matrix
        _require(tensor.isfinite().all())
        pairs.setdefault(matrix[1], {})[matrix[2]] = tensor
    deltas = {
        module: _delta(module, pair, config, shapes[module]) for module, pair in pairs.items()
    }
    _require(any(delta.any() for delta in deltas.values()))
    return deltas


def _delta(
    module: str, pair: dict[str, Tensor], config: LoraConfig, shape: tuple[int, int]
) -> Tensor:
    rank_key = get_pattern_key(config.rank_pattern.keys(), module)
    alpha_key = get_pattern_key(config.alpha_pattern.keys(), module)
    rank = config.rank_pattern.get(rank_key, config.r)
    alpha = config.alpha_pattern.get(alpha_key, config.lora_alpha)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    _require(pair.keys() == {"A", "B"})
    _require(pair["A"].shape == (rank, shape[0]) and pair["B"].shape == (shape[1], rank))
    _require((pair["B"].float() * scale).isfinite().all())
    delta: Tensor = scale * (pair["B"].double() @ pair["A"].double())
    return delta
