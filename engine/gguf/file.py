"""The tensors of a GGUF file under the names of transformers' model, each read when it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ...kernels.quantized_weight import QuantizedWeight
from ..errors import (
    DamagedBase,
    ShapesDiffer,
    UnsupportedModel,
    WeightsMissing,
    WeightsUnexpected,
)
from .blocks import read_dense, unpack_blocks
from .config import Architecture, architecture_of
from .header import NO_PACKAGE, GgufHeader, HeaderTensor, read_header
from .kinds import BLOCK_SIZES, QUANTIZED_KINDS
from .rope import CONFIG_TENSORS

_STACKED_EXPERTS = re.compile(r"^(?P<experts>.+\.experts)\.(?P<leaf>gate_up_proj|down_proj)$")
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MAX_REASON_CHARACTERS = 300


class GgufTensor(NamedTuple):
    """A tensor of the model, and where its values are in the file."""

    path: Path
    source: str
    """Its name in the file."""
    kind: str
    shape: tuple[int, ...]
    """In transformers' model."""
    offset: int
    """From the beginning of the file."""
    num_bytes: int
    rotary_heads: int | None = None
    """The heads whose rows are to be sorted; None: the rows are in their order."""
    is_one_more: bool = False
    """The stored values are one more than the model's."""

    @property
    def is_quantized(self) -> bool:
        """Whether it is a matrix of quantized blocks."""
        return self.kind in QUANTIZED_KINDS and len(self.shape) == 2

    def read_quantized(self) -> QuantizedWeight:
        """The matrix `[out, in]`. Only if it `is_quantized`.

        Raises DamagedBase if the file cannot be read.
        """
        assert self.is_quantized
        return unpack_blocks(self._rows(), self.kind, self.shape[-1])

    def read(self) -> QuantizedWeight | Tensor:
        """A quantized matrix as it is, anything else as numbers. Raises as above."""
        return self.read_quantized() if self.is_quantized else self.read_numbers()

    def row_reader(self) -> Callable[[range], QuantizedWeight | Tensor]:
        """Reads adjacent rows of a matrix `[out, in]`. Raises as above."""
        if self.is_quantized:
            return lambda rows: unpack_blocks(self._rows_of(rows), self.kind, self.shape[-1])
        return lambda rows: self._numbers(self._rows_of(rows)).view(len(rows), self.shape[-1])

    def read_numbers(self) -> Tensor:
        """The numbers: as stored if they are not quantized, else fp32.

        Raises DamagedBase if the file cannot be read.
        """
        return self._numbers(self._rows()).view(self.shape)

    def _numbers(self, rows: Tensor) -> Tensor:
        """The numbers of rows of bytes."""
        if self.kind in QUANTIZED_KINDS:
            size = BLOCK_SIZES[self.kind]
            columns = rows.shape[1] // size.num_bytes * size.values
            values = unpack_blocks(rows, self.kind, columns).dequantize()
        else:
            values = read_dense(rows, self.kind)
        if self.is_one_more:
            values = values.float() - 1
        return values

    def _rows(self) -> Tensor:
        """uint8 `[rows, bytes_per_row]`, the rows in the model's order."""
        return self._rows_of(range(self._num_rows))

    def _rows_of(self, rows: range) -> Tensor:
        """The same of some adjacent rows."""
        if self.rotary_heads is None:
            return self._stored_rows(rows)
        places = _sorted_rows(self._num_rows, self.rotary_heads)[rows.start : rows.stop]
        first = int(places.min())
        return self._stored_rows(range(first, int(places.max()) + 1))[places - first]

    @property
    def _num_rows(self) -> int:
        # Several dimensions before the last are rows of blocks; a vector's rows are its numbers.
        is_vector = len(self.shape) == 1 and self.kind not in QUANTIZED_KINDS
        return self.shape[0] if is_vector else prod(self.shape[:-1])

    def _stored_rows(self, rows: range) -> Tensor:
        """uint8 `[rows, bytes_per_row]` of adjacent rows in the file's order."""
        row_bytes = self.num_bytes // self._num_rows
        data = torch.empty(len(rows) * row_bytes, dtype=torch.uint8)
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset + rows.start * row_bytes)
                num_read = file.readinto(data.numpy().data)
        except OSError as exc:
            raise DamagedBase(f"{self.path} cannot be read: {exc.strerror or exc}") from exc
        if num_read != len(data):
            raise DamagedBase(f"{self.path} became shorter while it was read: download it again")
        return data.view(len(rows), row_bytes)


def tensor_names(path: Path, config: Mapping[str, Any]) -> dict[str, GgufTensor]:
    """The model's tensors by their names in a checkpoint of transformers; no values are read.

    `config` is that of `read_config`. Experts, which the file has stacked, have a tensor each. A
    tied output head is omitted. Raises as `read_header` does, WeightsMissing, WeightsUnexpected or
    ShapesDiffer if the file has not exactly the model's tensors, and UnsupportedModel without the
    package `gguf`.
    """
    header = read_header(path)
    architecture = architecture_of(header)
    names = _gguf_names(header.architecture, int(config["num_hidden_layers"]))
    found: dict[str, GgufTensor] = {}
    used: set[str] = set(CONFIG_TENSORS)
    for name, shape in _model_shapes(path, config).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for stored_name, stored_shape in _checkpoint_names(name, shape):
            source = _source(names, stored_name)
            if source not in header.tensors:
                raise WeightsMissing(f"{path} lacks {source or name}: download it again")
            used.add(source)
            tensor = _tensor(header, source, stored_shape, architecture, config)
            found |= _split_experts(stored_name, tensor) if name != stored_name else {name: tensor}
    if unexpected := sorted(header.tensors.keys() - used):
        raise WeightsUnexpected(
            f"{path}: {config['architectures'][0]} does not use its tensor {unexpected[0]}: give "
            "the original checkpoint"
        )
    return found


def _gguf_names(architecture: str, num_layers: int) -> Mapping[str, str]:
    """The names of modules in the file by those in checkpoints."""
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as exc:
        raise UnsupportedModel(NO_PACKAGE) from exc
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    mapping = get_tensor_name_map(kinds[architecture], num_layers).mapping
    return {name: source for name, (_, source) in mapping.items()}


def _source(names: Mapping[str, str], name: str) -> str:
    """The tensor in the file; empty if there is none for this name."""
    module, _, leaf = name.rpartition(".")
    return f"{names[module]}.{leaf}" if module in names else ""


def _model_shapes(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), attn_implementation="eager"
            )
    except Exception as exc:  # libraries raise all kinds for sizes that do not fit
        reason = " ".join(str(exc).split())[:_MAX_REASON_CHARACTERS]
        raise DamagedBase(f"{path}: its settings make no model: {reason}") from exc
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _checkpoint_names(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of which the model's tensor is made, and their shapes: stacked experts are stored
    in parts."""
    match = _STACKED_EXPERTS.match(name)
    if match is None:
        yield name, shape
        return
    parts = _EXPERT_PARTS[match["leaf"]]
    num_experts, rows, columns = shape
    for part in parts:
        yield f"{match['experts']}.{part}.weight", (num_experts, rows // len(parts), columns)


def _split_experts(name: str, stacked: GgufTensor) -> dict[str, GgufTensor]:
    """Each expert's part of a stacked tensor, as in checkpoints."""
    experts, leaf, suffix = name.rsplit(".", 2)
    num_experts, *shape = stacked.shape
    num_bytes = stacked.num_bytes // num_experts
    return {
        f"{experts}.{expert}.{leaf}.{suffix}": stacked._replace(
            shape=tuple(shape), offset=stacked.offset + expert * num_bytes, num_bytes=num_bytes
        )
        for expert in range(num_experts)
    }


def _tensor(
    header: GgufHeader,
    source: str,
    shape: tuple[int, ...],
    architecture: Architecture,
    config: Mapping[str, Any],
) -> GgufTensor:
    entry = header.tensors[source]
    if not _fits(entry, shape):
        raise ShapesDiffer(
            f"{header.path}: {source} is {list(entry.shape)}, and {list(shape)} by its settings: "
            "download it again"
        )
    rotary_heads = None
    if architecture.pairs_rotary_rows and ".attn_q." in source:
        rotary_heads = int(config["num_attention_heads"])
    elif architecture.pairs_rotary_rows and ".attn_k." in source:
        rotary_heads = int(config["num_key_value_heads"])
    return GgufTensor(
        header.path,
        source,
        entry.kind,
        shape,
        entry.offset,
        entry.num_bytes,
        rotary_heads,
        architecture.adds_one_to_norms and source.endswith("norm.weight"),
    )


def _fits(entry: HeaderTensor, shape: tuple[int, ...]) -> bool:
    """Equal, but for dimensions of 1 before the last, which files omit."""
    return entry.shape == shape or (1, *entry.shape) == shape


def _sorted_rows(num_rows: int, num_heads: int) -> Tensor:
    """int64 `[rows]`: the stored row of each row of the model.

    A head of the file has its rows as 0, n, 1, n + 1, ... where n is half of them.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
