"""The common interface of the model's parts that adapters can change.

Each part stands for one projection of the base's layout. During a step it changes the base's result
in the rows of the step's adapters, each row with its own adapter's values only. When a block is
loaded, it provides the base's values on which some served values depend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from ...adapters.layout import Projection

if TYPE_CHECKING:
    from ...adapters.arena import Arena


class BaseWeights(Protocol):
    """The base's weight of one projection, `W [out, in]`, out being that of all its slices."""

    @property
    def bias(self) -> Tensor | None:
        """`[out]`."""
        ...

    @property
    def row_norms(self) -> Tensor:
        """fp32 `[out]`: the norm of each row of the served W, dequantized."""
        ...

    def products(self, x: Tensor) -> Tensor:
        """`x [n, in] @ W.T`, without the bias: fp32 `[n, out]`."""
        ...


class AdaptedModule(Protocol):
    """One projection of the layout in the model."""

    @property
    def projection(self) -> Projection: ...

    def attach(self, arena: Arena, slice_range: range) -> None:
        """From now on, change the rows of the step's adapters with this arena's values."""
        ...

    def forget_adapter(self, row: int) -> None:
        """Zero copies of a row's weights outside of the arena."""
        ...

    def forget_step(self) -> None:
        """Drop the leftovers of a step that failed midway."""
        ...


class ExtendedModule(AdaptedModule, Protocol):
    """A projection that supports auxiliary tensors."""

    @property
    def base_weights(self) -> BaseWeights: ...

    @property
    def is_partial(self) -> bool:
        """Whether other ranks have the rest of its inputs."""
        ...


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Let the model have another module at this path."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
