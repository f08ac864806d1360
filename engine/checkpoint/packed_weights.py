"""Recognizes quantized weights in a base's files, from the headers and `config.json` alone.

A format stores a linear layer's weight as several tensors beside one another. Each such set becomes
one `PackedWeight` under the name that the model knows, `*.weight`. Imports no torch and reads no
weights; `unpacking.py` unpacks them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from ..errors import DamagedBase, QuantizedBase, ShapesDiffer
from .base_config import quantization_settings, quantized
from .stored_tensors import StoredTensor

WORD_BITS = 32
MAX_SIDE = 1 << 24
"""Rows or columns of a weight."""
_FP8_BLOCK = (128, 128)
"""Of DeepSeek's scales, unless its configuration has other sizes."""
_SPARE = re.compile(
    r"\.(input_scale|input_scale_ub|input_zero_point|[kv]_scale|weight_format|output_scale)$"
)
"""Scales of activations and of the KV cache, which are served unquantized, and a format's mark."""
_FLOATS = ("F32", "F16", "BF16")
_CODES = ("I8", "F8_E4M3")
_GPTQ_BITS = (2, 3, 4, 8)


class Packing(StrEnum):
    """How a weight is packed into tensors."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED_INTEGERS = "pack-quantized"
    """compressed-tensors: integers in words of 32 bits."""
    SCALED = "scaled"
    """int8 or fp8 codes with scales: compressed-tensors, DeepSeek, fbgemm, ModelOpt."""
    BNB4 = "bitsandbytes-4bit"
    BNB8 = "bitsandbytes-8bit"
    FP4 = "fp4"
    """compressed-tensors: e2m1 codes, two in a byte, with the scales of MXFP4 or NVFP4."""
    MXFP4_EXPERTS = "mxfp4"
    """The stacked experts of gpt-oss."""


class PackedWeight(NamedTuple):
    """The tensors of one quantized weight."""

    packing: Packing
    name: str
    """The model's own name of the weight."""
    shape: tuple[int, ...]
    """Of the weight in the model, `[out, in]`; of stacked experts `[experts, in, out]`."""
    parts: Mapping[str, str]
    """The stored tensors' names by their roles."""
    settings: Mapping[str, Any]
    """What the format's description has beside its tensors."""

    @property
    def format(self) -> str:
        """A name for people, such as gptq-int4 or fp8."""
        tool = {
            Packing.GPTQ: "gptq-",
            Packing.AWQ: "awq-",
            Packing.PACKED_INTEGERS: "compressed-tensors-",
            Packing.BNB4: "bitsandbytes-",
            Packing.BNB8: "bitsandbytes-",
        }.get(self.packing, "")
        return tool + str(self.settings["codes"])


class PackedWeights(NamedTuple):
    """A base's quantized weights."""

    weights: Mapping[str, PackedWeight]
    """By the model's own names."""
    rest: Mapping[str, StoredTensor]
    """All tensors that are not parts of them."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors as the model knows them, each quantized weight as one of floats."""
        as_floats = {
            name: StoredTensor("", "F32", weight.shape) for name, weight in self.weights.items()
        }
        return {**self.rest, **as_floats}

    @property
    def format(self) -> str | None:
        """The packing of most weights, such as gptq-int4; None if none is quantized."""
        names = Counter(weight.format for weight in self.weights.values())
        return names.most_common(1)[0][0] if names else None


def find_packed_weights(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any], folder: Path
) -> PackedWeights:
    """The weights that these tensors are parts of, their shapes checked.

    Raises DamagedBase, ShapesDiffer, or QuantizedBase for a format that is not served.
    """
    settings = quantization_settings(config, folder)
    found = _Finder(stored, settings, folder)
    weights = {weight.name: weight for weight in found.weights()}
    used = {name for weight in weights.values() for name in weight.parts.values()}
    rest = {name: tensor for name, tensor in stored.items() if name not in used}
    if settings and not weights:
        raise quantized(folder, "its configuration names a quantization that no tensor has")
    if weights:
        rest = {name: tensor for name, tensor in rest.items() if not _SPARE.search(name)}
    if both := sorted(weights.keys() & rest.keys()):
        raise DamagedBase(f"{folder}: {both[0]} is there twice, quantized and not")
    return PackedWeights(weights, rest)


class _Finder:
    def __init__(
        self, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any], folder: Path
    ) -> None:
        self._stored = stored
        self._settings = settings
        self._folder = folder

    def weights(self) -> Iterator[PackedWeight]:
        readers: Mapping[str, Callable[[str], PackedWeight]] = {
            ".qweight": self._words,
            ".weight_packed": self._packed,
            ".weight_scale": self._scaled,
            ".weight_scale_inv": self._scaled,
            ".weight.absmax": self._bnb4,
            ".SCB": self._bnb8,
            "_blocks": self._mxfp4,
        }
        for name in self._stored:
            for ending, read in readers.items():
                stem = name.removesuffix(ending)
                if stem != name and self._begins(stem, ending):
                    yield read(stem)

    def _begins(self, stem: str, ending: str) -> bool:
        """Whether the tensor with this ending makes a weight: scales may belong to packed words."""
        if ending == "_blocks":
            return f"{stem}_scales" in self._stored
        if ending.startswith(".weight_scale"):
            weight = self._stored.get(f"{stem}.weight")
            return weight is not None and weight.dtype in _CODES
        return True

    def _words(self, stem: str) -> PackedWeight:
        """GPTQ packs the inputs of each output into words, AWQ the outputs of each input."""
        parts = self._parts(stem, ["qweight", "scales"], ["qzeros", "g_idx"])
        rows, columns = self._matrix(parts["qweight"], "I32")
        groups, out_features = self._matrix(parts["scales"], *_FLOATS)
        if columns == out_features:
            return self._gptq(stem, parts, rows, out_features, groups)
        bits = self._setting(("bits", "w_bit"), default=4)
        version = str(self._settings.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or "qzeros" not in parts:
            raise self._refused(stem, f"AWQ with {bits} bits in the layout {version}")
        if columns * 8 != out_features:
            raise self._differs(parts["qweight"], f"[in, {out_features // 8}]")
        self._need(parts["qzeros"], (groups, columns), "I32")
        settings = {"codes": "int4", "bits": 4, "group": self._group(stem, rows, groups)}
        return self._weight(Packing.AWQ, stem, (out_features, rows), parts, settings)

    def _gptq(
        self, stem: str, parts: Mapping[str, str], rows: int, out_features: int, groups: int
    ) -> PackedWeight:
        bits = self._setting(("bits", "w_bit"), default=4)
        in_features = rows * WORD_BITS // bits if bits in _GPTQ_BITS else 0
        if "g_idx" in parts:  # a layer may have other bits than the configuration's
            (in_features,) = self._need(parts["g_idx"], (None,), "I32")
            bits = rows * WORD_BITS // in_features
        checkpoint = str(self._settings.get("checkpoint_format", "gptq")).lower()
        if bits not in _GPTQ_BITS or checkpoint not in ("gptq", "gptq_v2"):
            raise self._refused(stem, f"GPTQ with {bits} bits in the layout {checkpoint}")
        if rows != -(-in_features * bits // WORD_BITS):
            raise self._differs(parts["qweight"], f"words of {in_features} inputs")
        if "qzeros" in parts:
            self._need(parts["qzeros"], (groups, -(-out_features * bits // WORD_BITS)), "I32")
        settings = {
            "codes": f"int{bits}",
            "bits": bits,
            "group": self._group(stem, in_features, groups),
            "zeros_are_less_one": checkpoint == "gptq",
        }
        return self._weight(Packing.GPTQ, stem, (out_features, in_features), parts, settings)

    def _packed(self, stem: str) -> PackedWeight:
        is_fp4 = self._stored[f"{stem}.weight_packed"].dtype == "U8"
        return self._fp4(stem) if is_fp4 else self._packed_integers(stem)

    def _fp4(self, stem: str) -> PackedWeight:
        parts = self._parts(stem, ["weight_packed", "weight_scale"], ["weight_global_scale"])
        out_features, half = self._matrix(parts["weight_packed"], "U8")
        in_features = 2 * half
        dtypes = ("F8_E4M3",) if "weight_global_scale" in parts else ("U8", *_FLOATS)
        _, groups = self._need(parts["weight_scale"], (out_features, None), *dtypes)
        if total := parts.get("weight_global_scale"):
            self._need(total, (1,), "F32")
        if in_features % groups:
            raise self._differs(parts["weight_scale"], f"groups of {in_features} inputs")
        codes = "nvfp4" if "weight_global_scale" in parts else "mxfp4"
        settings = {"codes": codes, "group": in_features // groups}
        return self._weight(Packing.FP4, stem, (out_features, in_features), parts, settings)

    def _packed_integers(self, stem: str) -> PackedWeight:
        optional = ["weight_zero_point", "weight_g_idx", "weight_shape"]
        parts = self._parts(stem, ["weight_packed", "weight_scale"], optional)
        out_features, words = self._matrix(parts["weight_packed"], "I32")
        in_features = words * 8
        if declaration := parts.get("weight_shape"):
            self._need(declaration, (2,), "I64", "I32")
            declared = self._numbers(declaration)
            if declared[0] != out_features or not 0 < declared[1] <= words * WORD_BITS:
                raise self._differs(parts["weight_packed"], f"packed of {declared}")
            in_features = declared[1]
        fitting = [bits for bits in range(2, 9) if words == -(-in_features * bits // WORD_BITS)]
        if not fitting:
            raise self._refused(stem, f"{in_features} inputs in {words} words")
        bits = fitting[-1]
        _, groups = self._need(parts["weight_scale"], (out_features, None), *_FLOATS)
        if zeros := parts.get("weight_zero_point"):
            self._need(zeros, (-(-out_features * bits // WORD_BITS), groups), "I32")
        if order := parts.get("weight_g_idx"):
            self._need(order, (in_features,), "I32", "I64")
        group = self._group(stem, in_features, groups)
        settings = {"codes": f"int{bits}", "bits": bits, "group": group}
        shape = (out_features, in_features)
        return self._weight(Packing.PACKED_INTEGERS, stem, shape, parts, settings)

    def _scaled(self, stem: str) -> PackedWeight:
        inverse = f"{stem}.weight_scale_inv" in self._stored
        scale = "weight_scale_inv" if inverse else "weight_scale"
        parts = self._parts(stem, ["weight", scale], ["weight_zero_point"])
        shape = self._matrix(parts["weight"], *_CODES)
        parts["scale"] = parts.pop(scale)
        scales = self._stored[parts["scale"]].shape
        self._need(parts["scale"], scales, "U8", *_FLOATS)
        block = self._settings.get("weight_block_size") or self._block_of_groups() or _FP8_BLOCK
        block = _sizes(block, 2)
        if block is None or not self._fits(shape, scales, block):
            raise self._differs(parts["scale"], f"scales of {list(shape)}")
        if zeros := parts.get("weight_zero_point"):
            self._need(zeros, scales, "I8")
        codes = "int8" if self._stored[parts["weight"]].dtype == "I8" else "fp8"
        settings = {"codes": codes, "block": block}
        return self._weight(Packing.SCALED, stem, shape, parts, settings)

    def _block_of_groups(self) -> Any:
        """compressed-tensors' block sizes, by its groups of layers."""
        groups = self._settings.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict) and weights.get("block_structure"):
                return weights["block_structure"]
        return None

    @staticmethod
    def _fits(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, ...]) -> bool:
        """One scale, one for each output, for each output and group, or for each block."""
        out_features, in_features = shape
        if prod(scales) == 1 or scales == (out_features,):
            return True
        blocks = (-(-out_features // block[0]), -(-in_features // block[1]))
        by_group = len(scales) == 2 and scales[0] == out_features and scales[1] > 0
        return scales == blocks or (by_group and in_features % scales[1] == 0)

    def _bnb4(self, stem: str) -> PackedWeight:
        weight = f"{stem}.weight"
        kind = next((k for k in ("nf4", "fp4") if f"{weight}.{_state(k)}" in self._stored), None)
        if kind is None:
            raise self._refused(stem, "bitsandbytes without its quant_state")
        parts = {"weight": weight, "state": f"{weight}.{_state(kind)}"}
        parts |= self._parts(weight, ["absmax", "quant_map"], ["nested_absmax", "nested_quant_map"])
        state = self._json(parts["state"])
        shape, blocks = _sizes(state.get("shape"), 2), _sizes([state.get("blocksize")], 1)
        if shape is None or blocks is None:
            raise DamagedBase(f"{self._folder}: {parts['state']} has no valid shape and blocksize")
        (out_features, in_features), (block,) = shape, blocks
        size = out_features * in_features
        self._need(weight, (-(-size // 2), 1), "U8")
        self._need(parts["quant_map"], (16,), "F32")
        num_blocks = -(-size // block)
        settings: dict[str, Any] = {"codes": kind, "block": block}
        if "nested_absmax" in parts or "nested_quant_map" in parts:
            parts |= self._parts(weight, ["nested_absmax", "nested_quant_map"], [])
            nested, offset = _sizes([state.get("nested_blocksize")], 1), state.get("nested_offset")
            if nested is None or not isinstance(offset, int | float):
                raise DamagedBase(f"{self._folder}: {parts['state']} has no nested blocksize")
            self._need(parts["absmax"], (num_blocks,), "U8")
            self._need(parts["nested_absmax"], (-(-num_blocks // nested[0]),), "F32")
            self._need(parts["nested_quant_map"], (256,), "F32")
            settings |= {"nested_block": nested[0], "nested_offset": float(offset)}
        else:
            self._need(parts["absmax"], (num_blocks,), "F32")
        return self._weight(Packing.BNB4, stem, (out_features, in_features), parts, settings)

    def _bnb8(self, stem: str) -> PackedWeight:
        parts = self._parts(stem, ["weight", "SCB"], [])
        shape = self._matrix(parts["weight"], "I8")
        self._need(parts["SCB"], (shape[0],), *_FLOATS)
        return self._weight(Packing.BNB8, stem, shape, parts, {"codes": "int8"})

    def _mxfp4(self, stem: str) -> PackedWeight:
        parts = {"blocks": f"{stem}_blocks", "scales": f"{stem}_scales"}
        experts, out_features, groups, _ = self._need(parts["blocks"], (None, None, None, 16), "U8")
        self._need(parts["scales"], (experts, out_features, groups), "U8")
        shape = self._sized(stem, (experts, groups * 32, out_features))
        return PackedWeight(Packing.MXFP4_EXPERTS, stem, shape, parts, {"codes": "mxfp4"})

    def _weight(
        self,
        packing: Packing,
        stem: str,
        shape: tuple[int, int],
        parts: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> PackedWeight:
        name = f"{stem}.weight"
        return PackedWeight(packing, name, self._sized(name, shape), parts, settings)

    def _sized(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not all(0 < side <= MAX_SIDE for side in shape):
            raise ShapesDiffer(f"{self._folder}: {name} would be {list(shape)}: download it again")
        return shape

    def _parts(self, stem: str, needed: list[str], optional: list[str]) -> dict[str, str]:
        """The names of a weight's tensors by role. Raises DamagedBase if one is missing."""
        parts = {role: f"{stem}.{role}" for role in (*needed, *optional)}
        for role in needed:
            if parts[role] not in self._stored:
                raise DamagedBase(
                    f"{self._folder}: the quantized weight of {stem} lacks {parts[role]}: "
                    "download it again"
                )
        return {role: name for role, name in parts.items() if name in self._stored}

    def _matrix(self, name: str, *dtypes: str) -> tuple[int, int]:
        rows, columns = self._need(name, (None, None), *dtypes)
        return rows, columns

    def _need(self, name: str, shape: tuple[int | None, ...], *dtypes: str) -> tuple[int, ...]:
        """The tensor's shape; None fits any size. Raises DamagedBase, ShapesDiffer."""
        tensor = self._stored.get(name)
        if tensor is None:
            raise DamagedBase(f"{self._folder}: {name} is missing: download it again")
        if tensor.dtype not in dtypes:
            raise DamagedBase(
                f"{self._folder}: {name} is {tensor.dtype}, not {' or '.join(dtypes)}"
            )
        fits = len(shape) == len(tensor.shape) and all(
            size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
        )
        if not fits or not all(0 < size <= MAX_SIDE for size in tensor.shape):
            expected = ["any" if size is None else size for size in shape]
            raise self._differs(name, str(expected))
        return tensor.shape

    def _group(self, stem: str, in_features: int, groups: int) -> int:
        """Inputs of a group: as configured, if as many groups result, else an equal division."""
        configured = self._setting(("group_size", "q_group_size"), default=0)
        if configured > 0 and -(-in_features // configured) == groups:
            return min(configured, in_features)
        if groups and in_features % groups == 0:
            return in_features // groups
        raise ShapesDiffer(
            f"{self._folder}: {stem} has {groups} groups for {in_features} inputs: "
            "download it again"
        )

    def _setting(self, names: tuple[str, ...], *, default: int) -> int:
        for name in names:
            value = self._settings.get(name)
            if type(value) is int:
                return value
        return default

    def _numbers(self, name: str) -> list[int]:
        with safe_open(self._folder / self._stored[name].file, framework="numpy") as file:
            return [int(number) for number in file.get_tensor(name)]

    def _json(self, name: str) -> dict[str, Any]:
        """The object in a tensor of bytes. Raises DamagedBase."""
        self._need(name, (None,), "U8")
        with safe_open(self._folder / self._stored[name].file, framework="numpy") as file:
            content = file.get_tensor(name).tobytes()
        try:
            state = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise DamagedBase(f"{self._folder}: {name} is not valid JSON") from exc
        if not isinstance(state, dict):
            raise DamagedBase(f"{self._folder}: {name} is not a JSON object")
        return state

    def _differs(self, name: str, expected: str) -> ShapesDiffer:
        shape = list(self._stored[name].shape)
        return ShapesDiffer(f"{self._folder}: {name} is {shape}, expected {expected}")

    def _refused(self, stem: str, what: str) -> QuantizedBase:
        return quantized(self._folder, f"{stem}: {what}")


def _state(kind: str) -> str:
    return f"quant_state.bitsandbytes__{kind}"


def _sizes(value: Any, count: int) -> tuple[int, ...] | None:
    """So many sizes from JSON; None if it is anything else."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    are_sizes = all(type(size) is int and 0 < size <= MAX_SIDE for size in value)
    return tuple(value) if are_sizes else None
