"""Experts whose matrices stay in a base's files until they are packed.

transformers stacks the matrices of a layer's experts, which most checkpoints store one by one, in
two parameters. Here each expert's part of such a parameter is read by itself, in the form that the
files have. A forward pass before packing gets the experts that its tokens are routed to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..gguf.file import GgufTensor
from .stored_weights import (
    AnyStoredWeight,
    Placeholder,
    StoredPackedWeight,
    Values,
    dense,
    identity,
    kept_dtype,
    stack_values,
)


class ExpertsParameter(NamedTuple):
    """A parameter with the matrices of a layer's experts."""

    path: str
    """Of its module."""
    name: str
    is_transposed: bool
    """It is `[experts, in, out]`, else `[experts, out, in]`."""

    @property
    def full_name(self) -> str:
        """Its path in the model."""
        return f"{self.path}.{self.name}"


ExpertsOf = Callable[[PreTrainedModel], Iterable[ExpertsParameter]]
"""Chooses parameters of a model."""


class StoredPart(NamedTuple):
    """Rows of one expert's matrix."""

    name: str
    """Of the stored weight."""
    expert: int | None
    """Its place in a weight that holds all experts; None: the weight is this expert's."""


ChangesMatrix = Callable[[str, Values], Values]
"""From a parameter's name and an expert's matrix `[out, in]`, the matrix in another form."""
Matrices = Sequence[Sequence[StoredPart]]
"""For each expert the parts of its matrix, which lie below one another."""


class Stacking(TorchFunctionMode):
    """While entered, sees which tensors the loader makes of others by stacking and joining them."""

    def __init__(self, placeholders: Mapping[str, Placeholder]) -> None:
        super().__init__()
        self._names = {identity(tensor): name for name, tensor in placeholders.items()}
        self._made: dict[Any, tuple[Tensor, Any, int, Sequence[Tensor]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.stack, torch.cat):
            dim = (kwargs or {}).get("dim", args[1] if len(args) > 1 else 0)
            # Kept alive: an identity is unique only as long as its tensor is.
            self._made[identity(result)] = (result, func, dim, list(args[0]))
        return result

    def matrices(self, parameter: Tensor, *, is_transposed: bool) -> Matrices | None:
        """The stored matrices of this parameter `[experts, ...]`; None unless it has them as they
        are."""
        name = self._names.get(identity(parameter))
        if name is not None:
            return [[StoredPart(name, expert)] for expert in range(len(parameter))]
        if is_transposed or identity(parameter) not in self._made:
            return None
        _, func, dim, parts = self._made[identity(parameter)]
        if func is torch.stack and dim == 0:
            names = [self._names.get(identity(part)) for part in parts]
            return None if None in names else [[StoredPart(str(name), None)] for name in names]
        joined = [self.matrices(part, is_transposed=False) for part in parts]
        if func is not torch.cat or dim != 1 or None in joined:
            return None
        experts = zip(*(each for each in joined if each is not None), strict=True)
        return [[part for parts in expert for part in parts] for expert in experts]


class StoredExperts(NamedTuple):
    """Where the matrices of an experts' parameter are."""

    weights: Mapping[str, AnyStoredWeight]
    """All of the base, by their names."""
    matrices: Matrices
    is_transposed: bool

    @property
    def names(self) -> Iterator[str]:
        """Of the stored weights."""
        return (part.name for parts in self.matrices for part in parts)

    def read(self, expert: int) -> Values:
        """The expert's matrix `[out, in]` as it is stored. Raises DamagedBase."""
        values = [self._read_part(part) for part in self.matrices[expert]]
        if len(values) == 1:
            return values[0]
        stacked = stack_values(values)
        if stacked is not None:
            return stacked
        cpu = torch.device("cpu")
        return torch.cat([dense(part, dtype=torch.float32, device=cpu) for part in values])

    def _read_part(self, part: StoredPart) -> Values:
        weight = self.weights[part.name]
        if part.expert is None:
            return weight.read()
        assert not isinstance(weight, GgufTensor), "its experts have a tensor each"
        values = weight.read_expert(part.expert)
        # Codes are along the inputs in any case.
        return values.T if self.is_transposed and isinstance(values, Tensor) else values


def find_experts(
    model: PreTrainedModel,
    parameters: Iterable[ExpertsParameter],
    stacking: Stacking,
    stored: Mapping[str, AnyStoredWeight],
) -> dict[ExpertsParameter, StoredExperts]:
    """Those of the parameters whose matrices the files hold as they are.

    The model was loaded from placeholders while `stacking` looked on.
    """
    found = {}
    for parameter in parameters:
        weight = getattr(model.get_submodule(parameter.path), parameter.name)
        matrices = stacking.matrices(weight, is_transposed=parameter.is_transposed)
        if matrices is not None and are_readable(matrices, stored, parameter):
            found[parameter] = StoredExperts(stored, matrices, parameter.is_transposed)
    return found


def are_readable(
    matrices: Matrices, stored: Mapping[str, Any], parameter: ExpertsParameter
) -> bool:
    """Stacked codes are along the last dimension but one, which must be the inputs."""
    is_packed = any(
        part.expert is not None and isinstance(stored[part.name], StoredPackedWeight)
        for parts in matrices
        for part in parts
    )
    return parameter.is_transposed or not is_packed


class LeftExperts:
    """A module's experts that were left in their files; see `leave_experts`."""

    def __init__(
        self,
        module: nn.Module,
        stored: Mapping[str, StoredExperts],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.stored = stored
        """By the parameters' names."""
        self._dtype = dtype
        self.device = device
        self._is_held = False
        self._apply: ChangesMatrix | None = None
        self._empty = {
            name: nn.Parameter(
                getattr(module, name).as_subclass(Tensor).detach(), requires_grad=False
            )
            for name in stored
        }
        self._drop(module)
        self._hooks = (
            module.register_forward_pre_hook(self._fill, with_kwargs=True),
            module.register_forward_hook(self._drop),
        )

    def matrices(self, name: str, experts: range) -> Iterator[Values]:
        """The matrix `[out, in]` of each of these experts on the device, as `weight_values` has a
        layer's."""
        for expert in experts:
            yield self._read(name, expert)

    def part(self, name: str, experts: range) -> nn.Parameter:
        """The parameter of these experts alone: `[len(experts), ...]`."""
        weight = self._zeros(name, len(experts))
        for place, expert in enumerate(experts):
            weight[place] = self._matrix(name, expert)
        return nn.Parameter(weight, requires_grad=False)

    def _whole(self, name: str, experts: Iterable[int]) -> nn.Parameter:
        """The parameter with the values of these experts, and zeros."""
        weight = self._zeros(name, len(self._empty[name]))
        for expert in experts:
            weight[expert] = self._matrix(name, expert)
        return nn.Parameter(weight, requires_grad=False)

    def _zeros(self, name: str, num_experts: int) -> Tensor:
        shape = (num_experts, *self._empty[name].shape[1:])
        return torch.zeros(shape, dtype=self._dtype, device=self.device)

    def _matrix(self, name: str, expert: int) -> Tensor:
        """As the parameter has it."""
        values = self._read(name, expert)
        if self._apply is not None:
            values = self._apply(name, values)
        matrix = dense(values, dtype=self._dtype, device=self.device)
        return matrix.T if self.stored[name].is_transposed else matrix

    def _read(self, name: str, expert: int) -> Values:
        """The matrix `[out, in]` in the form of `matrices`."""
        values = self.stored[name].read(expert)
        if isinstance(values, Tensor):
            return values.to(self.device, kept_dtype(values.dtype, self._dtype))
        return values.to(self.device)

    @contextmanager
    def in_memory(self, module: nn.Module) -> Iterator[None]:
        """Meanwhile the module's parameters have all values, read once for many forward passes."""
        self._is_held = True
        for name in self.stored:
            setattr(module, name, self.part(name, range(len(self._empty[name]))))
        try:
            yield
        finally:
            self._is_held = False
            self._drop(module)

    @contextmanager
    def applying(self, apply: ChangesMatrix) -> Iterator[None]:
        """Meanwhile, forward passes compute with the values of what `apply` makes of the matrices
        that they read."""
        self._apply = apply
        try:
            yield
        finally:
            self._apply = None

    def stop(self) -> None:
        """From now on, forward passes leave the module's parameters as they are."""
        for hook in self._hooks:
            hook.remove()

    def _fill(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._is_held:
            return
        experts = chosen_experts(args, kwargs).unique().tolist()
        for name in self.stored:
            setattr(module, name, self._whole(name, experts))

    def _drop(self, module: nn.Module, *_: Any) -> None:
        if self._is_held:
            return
        for name, empty in self._empty.items():
            setattr(module, name, empty)


def chosen_experts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """int64 `[num_tokens, top_k]`, of the arguments of a forward pass of experts."""
    chosen: Tensor = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
    return chosen


def leave_experts(
    model: PreTrainedModel,
    found: Mapping[ExpertsParameter, StoredExperts],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """From now on these parameters are on the meta device, and each forward pass of their module
    reads the experts to which it routes tokens."""
    for path in {parameter.path for parameter in found}:
        module = model.get_submodule(path)
        stored = {parameter.name: found[parameter] for parameter in found if parameter.path == path}
        left = LeftExperts(module, stored, dtype=dtype, device=device)
        module.__dict__["left_experts"] = left


def left_experts(module: nn.Module) -> LeftExperts | None:
    """The module's experts that were left in their files; None: all are in memory."""
    left: LeftExperts | None = module.__dict__.get("left_experts")
    return left
