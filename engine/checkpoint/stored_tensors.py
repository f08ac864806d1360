"""The tensors in a base model's safetensors files, from their headers only.

Imports no torch and reads no weights: a folder with terabytes is checked in milliseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ..errors import DamagedBase, ForeignBase, ShapesDiffer, WeightsMissing
from .base_config import quantized, read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LFS_POINTER = b"version https://git-lfs"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BUFFERS = frozenset({"I64", "BOOL"})
"""The dtypes of buffers; no quantization packs weights into these."""
_PACKED_NAMES = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_shape|absmax|quant_map|SCB|weight_format)$"
    r"|\.quant_state\."
)
_EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<leaf>.+)$")
_MASKS_AND_POSITIONS = (
    r"rotary(_pos)?_emb\.inv_freq$",
    r"(^|\.)(attn|attention)\.(masked_)?bias$",
    r"(^|\.)position_ids$",
)
"""Buffers that older checkpoints store and that models compute."""
_NEXT_TOKEN_HEADS = (r"(^|\.)mtp[._]",)
"""Multi-token prediction by name: Qwen3-Next, MiMo, ERNIE 4.5, EXAONE, LongCat and others."""
_NUM_NEXT_TOKEN_LAYERS = "num_nextn_predict_layers"
"""The setting of DeepSeek, GLM and others for the number of layers appended to the decoder for
this."""


class StoredTensor(NamedTuple):
    """A tensor's header."""

    file: str
    dtype: str
    """In safetensors' notation, such as BF16."""
    shape: tuple[int, ...]


def read_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the files that the loader reads, by name.

    Raises ForeignBase without such files, DamagedBase if one is missing or incomplete.
    """
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_header(path):
            if name in stored:
                raise DamagedBase(
                    f"{folder}: {name} is in {stored[name].file} and in {path.name}: "
                    "remove the files that do not belong to this model"
                )
            stored[name] = tensor
    _check_index(folder, stored)
    return stored


def weight_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the files that its index names. Raises ForeignBase, DamagedBase."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if not index.exists():
        if not single.exists():
            raise ForeignBase(foreign_weights(folder))
        return [single]
    shards = [folder / name for name in sorted(set(_weight_map(index).values()))]
    if single.exists() and single not in shards:
        if any(shard.exists() for shard in shards):
            raise DamagedBase(
                f"{folder} has both {WEIGHTS_FILE} and the files of {INDEX_FILE}: "
                "remove those that do not belong to this model"
            )
        return [single]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise DamagedBase(
            f"{folder} lacks {len(missing)} of the {len(shards)} files in {INDEX_FILE}, "
            f"first {missing[0]}: download it"
        )
    return shards


def check_stored_tensors(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any], folder: Path
) -> None:
    """Refuse quantized tensors and incomplete lists of experts.

    Raises QuantizedBase, WeightsMissing, ShapesDiffer.
    """
    is_spare = spare_tensors(config)
    for name, tensor in stored.items():
        if _PACKED_NAMES.search(name):
            raise quantized(folder, f"its tensor {name} belongs to packed weights")
        if tensor.dtype not in _FLOATS | _BUFFERS and not is_spare.search(name):
            raise quantized(folder, f"its tensor {name} is {tensor.dtype}")
    _check_experts(stored, folder)


def spare_tensors(config: Mapping[str, Any]) -> re.Pattern[str]:
    """Names of tensors that a checkpoint may hold although its model does not use them."""
    patterns = [*_MASKS_AND_POSITIONS, *_NEXT_TOKEN_HEADS]
    first, count = config.get("num_hidden_layers"), config.get(_NUM_NEXT_TOKEN_LAYERS)
    if type(first) is int and type(count) is int:
        patterns += [rf"(^|\.)layers\.{layer}\." for layer in range(first, first + count)]
    return re.compile("|".join(patterns))


def read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one file. Raises DamagedBase."""
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                yield name, StoredTensor(path.name, part.get_dtype(), shape)
    except SafetensorError as exc:
        raise DamagedBase(f"{path} is {_damage(path)}") from exc
    except OSError as exc:
        raise DamagedBase(f"{path} cannot be read: {exc.strerror or exc}") from exc


def _damage(path: Path) -> str:
    with path.open("rb") as file:
        beginning = file.read(len(_LFS_POINTER))
    if beginning == _LFS_POINTER:
        return "a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
    return "damaged or only a part of the file: download it again"


def _check_index(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    if not (folder / INDEX_FILE).exists() or (folder / WEIGHTS_FILE).exists():
        return
    for name, file in sorted(_weight_map(folder / INDEX_FILE).items()):
        if name not in stored or stored[name].file != file:
            raise DamagedBase(
                f"{folder / INDEX_FILE} says that {name} is in {file}, where it is not: "
                "download the index and that file again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedBase(f"{index} has no weight_map; download it again")
    for name in weight_map.values():
        # Only files directly in the folder are part of the base's identity.
        if not isinstance(name, str) or Path(name).name != name:
            raise DamagedBase(f"{index} names {name!r}, which is not a file of its folder")
    return weight_map


def foreign_weights(folder: Path) -> str:
    """Why a folder without the loader's files is refused."""
    if gguf := _first(folder, ["*.gguf"]):
        return f"{folder} has its weights as GGUF: give the file itself, {folder / gguf}"
    if other := _first(folder, ["*.safetensors"]):
        return (
            f"{folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}, only {other}: "
            "give a model in the Hugging Face layout"
        )
    if pickle := _first(folder, _PICKLES):
        return (
            f"{folder} has its weights as a pickle ({pickle}), which could run code and is "
            "not read: convert it to safetensors where you trust it"
        )
    return f"{folder} has no weights: it lacks {WEIGHTS_FILE} or {INDEX_FILE}; download them"


def _first(folder: Path, patterns: Iterable[str]) -> str | None:
    return min((path.name for pattern in patterns for path in folder.glob(pattern)), default=None)


def _check_experts(stored: Mapping[str, StoredTensor], folder: Path) -> None:
    """Experts are stacked in the order of their numbers: a gap would shift all later experts."""
    leaves: defaultdict[str, set[str]] = defaultdict(set)
    counts: defaultdict[str, int] = defaultdict(int)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for name, tensor in stored.items():
        if match := _EXPERT.match(name):
            experts, index, leaf = match["experts"], int(match["index"]), match["leaf"]
            leaves[experts].add(leaf)
            counts[experts] = max(counts[experts], index + 1)
            if shapes.setdefault((experts, leaf), tensor.shape) != tensor.shape:
                raise ShapesDiffer(
                    f"{folder}: {name} is {list(tensor.shape)}, in other experts of the same "
                    f"layer {list(shapes[experts, leaf])}: download it again"
                )
    for experts, count in counts.items():
        for name in (f"{experts}.{i}.{leaf}" for i in range(count) for leaf in leaves[experts]):
            if name not in stored:
                raise WeightsMissing(f"{folder}: {name} is missing; download it again")
