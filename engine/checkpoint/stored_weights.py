"""Weights that stay in a base's files until they are used: those that are served in another form.

Quantizing the base, and packing weights that the files hold quantized, needs every linear weight
once. The checks at load need them a few times before that, in the serving dtype. All of them
together would be several times the size of the served base. So such a layer has no weight of its
own: each use reads it from its file, and the memory is free again after the use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ...kernels.quantized_weight import QuantizedWeight, stack_rows
from ..gguf.file import GgufTensor, tensor_names
from ..gguf.header import GGUF_FILE
from .base_config import read_config_file
from .file_slices import FileSlices
from .packed_weights import PackedWeight, find_packed_weights
from .stored_tensors import read_stored_tensors
from .text_part import of_text_part
from .unpacking import RowUnpacker, codes_role, unpack, unpack_expert

Values = Tensor | QuantizedWeight
RowReader = Callable[[range], Values]
"""Reads adjacent rows of a weight `[out, in]`. All have the form of the whole weight."""


class StoredWeight(NamedTuple):
    """A tensor in one of a base's files."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The values as stored, mapped from the file: their pages go with the tensor."""
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor

    def open_slices(self) -> FileSlices:
        return FileSlices(self.path, self.name)

    def row_reader(self) -> RowReader:
        """Reads rows of a matrix `[out, in]` and no others."""
        sliced = self.open_slices()
        return lambda rows: sliced[rows.start : rows.stop]

    def read_expert(self, expert: int) -> Tensor:
        """The values of one expert of `[experts, ...]`."""
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_slice(self.name)[expert]
        return tensor


class StoredPackedWeight(NamedTuple):
    """A quantized weight in several tensors of a base's files."""

    packed: PackedWeight
    parts: Mapping[str, StoredWeight]
    """By their roles."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape

    def read(self) -> Values:
        """The weight; a dense tensor if no form of codes has its values. Raises DamagedBase."""
        tensors: dict[str, Tensor] = {}
        for path in {part.path for part in self.parts.values()}:
            with safe_open(path, framework="pt") as file:
                for role, part in self.parts.items():
                    if part.path == path:
                        tensors[role] = file.get_tensor(part.name)
        return unpack(self.packed, tensors)

    def row_reader(self) -> RowReader:
        """Unpacks no more than the rows of a call. Raises DamagedBase, as the calls do."""
        large = codes_role(self.packed)
        tensors = {role: part.read() for role, part in self.parts.items() if role != large}
        return RowUnpacker(self.packed, tensors, self.parts[large].open_slices()).unpack

    def read_expert(self, expert: int) -> QuantizedWeight:
        """The matrix `[out, in]` of one of stacked experts. Raises DamagedBase."""
        tensors = {role: part.read_expert(expert) for role, part in self.parts.items()}
        return unpack_expert(self.packed, tensors)


AnyStoredWeight = StoredWeight | StoredPackedWeight | GgufTensor


class Placeholder(Tensor):
    """A tensor without values, in the serving dtype. transformers' loader puts it where it belongs;
    it stays the same tensor unless the loader converts it."""

    def to(self, *_args: Any, dtype: torch.dtype | None = None, **_kwargs: Any) -> Tensor:
        return self if dtype in (None, self.dtype) else super().to(dtype=dtype)


def placeholder(weight: AnyStoredWeight, dtype: torch.dtype) -> Placeholder:
    """A tensor of this weight's shape without values."""
    empty = torch.empty(weight.shape, dtype=dtype, device="meta")
    return empty.as_subclass(Placeholder)


def stored_weights(folder: Path) -> dict[str, AnyStoredWeight]:
    """All weights of the base's files by the model's names. Raises a subclass of UnsupportedModel.

    The tensors of a quantized weight are one weight.
    """
    config = read_config_file(folder)
    if (folder / GGUF_FILE).exists():
        return dict(tensor_names(folder / GGUF_FILE, config))
    tensors = read_stored_tensors(folder)
    stored = {
        name: StoredWeight(folder / tensor.file, name, tensor.shape)
        for name, tensor in tensors.items()
    }
    packed = find_packed_weights(tensors, config, folder)
    found: dict[str, AnyStoredWeight] = {name: stored[name] for name in packed.rest}
    for name, weight in packed.weights.items():
        parts = {role: stored[part] for role, part in weight.parts.items()}
        found[name] = StoredPackedWeight(weight, parts)
    return of_text_part(found, config, folder)


def format_of(stored: AnyStoredWeight) -> str | None:
    """The format of a weight, such as gptq-int4 or gguf-q4_k; None: it is not quantized."""
    match stored:
        case StoredPackedWeight(packed):
            return packed.format
        case GgufTensor(kind=kind) if stored.is_quantized:
            return f"gguf-{kind.lower()}"
    return None


def dense(values: Values, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight's values on the device, dequantized there."""
    if isinstance(values, QuantizedWeight):
        return values.to(device).dequantize(dtype)
    return values.to(device=device, dtype=dtype)


def stack_values(weights: Sequence[Values]) -> Values | None:
    """The weights `[out, in]` below one another; None unless they are of one form."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if quantized and plain:
        return None
    return stack_rows(quantized) if quantized else torch.cat(plain)


def unconverted(
    modules: Mapping[str, nn.Module], placeholders: Mapping[str, Placeholder]
) -> dict[str, str]:
    """Module name to the name of the stored tensor that is its weight, if it is one as it is.

    The modules' model was loaded from the placeholders. A weight that the loader makes of others,
    by stacking or transposing, is another tensor than each of them.
    """
    names = {identity(placeholder): name for name, placeholder in placeholders.items()}
    found = {name: names.get(identity(module.weight)) for name, module in modules.items()}
    return {name: stored for name, stored in found.items() if stored is not None}


def leave_stored(
    module: nn.Module, stored: AnyStoredWeight, *, dtype: torch.dtype, device: torch.device
) -> None:
    """From now on the module's weight is a tensor on the meta device, and its values are read from
    the file for each forward pass, and by `weight_values`."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    empty = nn.Parameter(weight.as_subclass(Tensor).detach(), requires_grad=False)
    module.weight = empty

    def fill(module: nn.Module, _args: Any) -> None:
        values = module.__dict__.get("kept_weight")
        if values is None:
            values = dense(stored.read(), dtype=dtype, device=device)
        module.weight = nn.Parameter(values, requires_grad=False)

    def drop(module: nn.Module, _args: Any, _output: Any) -> None:
        module.weight = empty

    module.register_forward_pre_hook(fill)
    module.register_forward_hook(drop)
    read_again(module, stored, dtype=dtype, device=device)


def read_again(
    module: nn.Module, stored: AnyStoredWeight, *, dtype: torch.dtype, device: torch.device
) -> None:
    """From now on `weight_values` reads the module's weight from the file, in its form there."""

    def placed(values: Values) -> Values:
        if isinstance(values, QuantizedWeight):
            return values.to(device)
        return values.to(device=device, dtype=kept_dtype(values.dtype, dtype))

    def row_reader() -> RowReader:
        read_rows = stored.row_reader()
        return lambda rows: placed(read_rows(rows))

    module.__dict__["read_weight"] = lambda: placed(stored.read())
    module.__dict__["row_reader"] = row_reader
    module.__dict__["stored_weight"] = stored


def leave_rows(
    module: nn.Module, stored: AnyStoredWeight, *, dtype: torch.dtype, device: torch.device
) -> None:
    """The module's weight is a tensor on the meta device, and `row_reader` reads rows of it from
    the file. Nothing is computed with it so far."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    empty = weight.as_subclass(Tensor).detach()
    module.weight = nn.Parameter(empty, requires_grad=False)
    read_again(module, stored, dtype=dtype, device=device)


def stored_weight(module: nn.Module) -> AnyStoredWeight | None:
    """Where `weight_values` reads the module's weight; None: from the module."""
    stored: AnyStoredWeight | None = module.__dict__.get("stored_weight")
    return stored


def keep_weight(module: nn.Module, values: Tensor | None) -> None:
    """Let the module, whose weight was left in its file, compute with these values from now on;
    None: with the file's again."""
    module.__dict__["kept_weight"] = values


def kept_dtype(stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The stored dtype if the serving dtype has all its numbers, else the serving dtype."""
    return stored if torch.promote_types(stored, dtype) is dtype else dtype


def weight_values(module: nn.Module) -> Values:
    """The module's weight; read from its file if it was left there, or is to be read again. Then it
    is quantized as in the file, or in the file's dtype, if that holds the same values in fewer
    bytes."""
    read: Callable[[], Values] | None = module.__dict__.get("read_weight")
    if read is not None:
        return read()
    assert isinstance(module.weight, Tensor)
    return module.weight.detach()


def row_reader(module: nn.Module) -> RowReader:
    """Reads rows of the module's weight as `weight_values` gives it, and no others."""
    open_rows: Callable[[], RowReader] | None = module.__dict__.get("row_reader")
    if open_rows is not None:
        return open_rows()
    values = weight_values(module)
    assert isinstance(values, Tensor), "a weight in memory is dense"
    return lambda rows: values[rows.start : rows.stop]


def identity(tensor: Any) -> tuple[object, ...]:
    """Equal for tensors that are one in another object."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version
