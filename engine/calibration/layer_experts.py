"""A layer's experts, quantized one after another, each with the inputs of the tokens routed to it.

transformers stacks the matrices of a layer's experts in two parameters. Most files hold each matrix
by itself, such as `experts.3.up_proj.weight`, and the quantized checkpoint has the same names. Of
experts that the files hold in one tensor, nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...kernels.quantized_weight import QuantizedWeight
from ..checkpoint.stored_experts import LeftExperts, chosen_experts, left_experts
from ..checkpoint.stored_weights import Values, dense
from ..model.experts import parameter_names

_SHARED_TOKENS = 4096
"""About so many of a layer's tokens count for each expert, whichever experts they went to."""
_SHARED_WEIGHT = 0.25
"""Of these together, in routed tokens for each input of the matrix (decision 62)."""

Rounding = Callable[[Tensor, Tensor | None], QuantizedWeight]
"""Of a matrix `[out, in]` and its hessian, None where it has none."""


class ExpertMatrix(NamedTuple):
    """A matrix of one expert as the files hold it: rows of the expert's part of a parameter."""

    parameter: str
    expert: int
    start: int
    shape: tuple[int, ...]
    """`[out, in]`."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.shape[0])


class LayerExperts:
    """The experts of one layer."""

    def __init__(self, path: str, module: nn.Module, left: LeftExperts) -> None:
        """left: of the module, whose path in the model is `path`."""
        self.path = path
        self.matrices = _matrices(left)
        """By their path in the files; empty if these hold them in another form."""
        self._module: Any = module
        self._left = left
        self._routed: RoutedInputs | None = None

    def in_memory(self) -> AbstractContextManager[None]:
        """Meanwhile their matrices are in memory, fp32, and may be changed there."""
        return self._left.in_memory(self._module)

    def set(self, path: str, values: Values) -> None:
        """Compute with these values of the matrix with this path."""
        matrix = self.matrices[path]
        weight = self._weight(matrix.parameter, matrix.expert)
        weight[matrix.rows] = dense(values, dtype=torch.float32, device=self._left.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile keep what the experts are given, until they are quantized."""
        self._routed = RoutedInputs()
        hook = self._module.register_forward_pre_hook(self._routed.add, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def quantize(
        self, chosen: Set[str], rounding: Rounding
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        """Quantize the matrices with the chosen paths, and compute with the result.

        The matrices of one expert in one parameter have the same inputs, and are rounded together.
        There are hessians if the experts were watched.
        """
        inputs, self._routed = self._routed, None
        for expert in range(self._module.num_experts):
            own = [
                (path, matrix)
                for path, matrix in self.matrices.items()
                if matrix.expert == expert and path in chosen
            ]
            hessians = self._hessians(expert, inputs) if inputs and own else {}
            for name in parameter_names(self._module):
                paths = [path for path, matrix in own if matrix.parameter == name]
                if paths:
                    rounded = rounding(self._weight(name, expert), hessians.get(name))
                    yield from self._replaced(paths, rounded)

    def _replaced(
        self, paths: Sequence[str], rounded: QuantizedWeight
    ) -> Iterator[tuple[str, QuantizedWeight]]:
        for path in paths:
            rows = self.matrices[path].rows
            part = rounded.rows(rows.start, rows.stop)
            self.set(path, part)
            yield path, part

    def _hessians(self, expert: int, inputs: RoutedInputs) -> dict[str, Tensor]:
        """Of the expert's inputs, fp32 `[in, in]`, by the parameter that multiplies them.

        The sum of `x xᵀ` of the tokens routed to it, and a little of that of all tokens: an expert
        that got few has directions in which it got none.
        """
        found: dict[str, Tensor] = {}
        shared = inputs.spread(_SHARED_TOKENS)
        for name, rows in self._inputs(expert, shared):
            weight = _SHARED_WEIGHT * rows.shape[1] / len(rows)
            found[name] = (rows.T @ rows) * weight
        for given in inputs.of(expert):
            for name, rows in self._inputs(expert, given):
                found[name].addmm_(rows.T, rows)
        return found

    def _inputs(self, expert: int, given: Tensor) -> Iterator[tuple[str, Tensor]]:
        """`[n, in]` of both parameters, for tokens `given [n, hidden]`."""
        first, second = parameter_names(self._module)
        x = given.to(self._left.device, torch.float32)
        yield first, x
        yield second, self._between(first, expert, x)

    def _between(self, first: str, expert: int, x: Tensor) -> Tensor:
        """`[n, in]`: what the expert's second matrix is given for `x [n, hidden]`."""
        module = self._module
        bias = getattr(module, f"{first}_bias")[expert] if module.has_bias else None
        y = F.linear(x, self._weight(first, expert), bias)
        between: Tensor = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        return between

    def _weight(self, name: str, expert: int) -> Tensor:
        """`[out, in]`, a view."""
        weights: Tensor = getattr(self._module, name)
        return weights[expert]


class RoutedInputs:
    """What a layer's experts are given, and which tokens each of them gets."""

    def __init__(self) -> None:
        self._calls: list[tuple[Tensor, Tensor]] = []

    def add(self, _module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The pre-hook of the experts' module. Inputs are kept in host memory."""
        given: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        chosen = chosen_experts(args, kwargs)
        self._calls.append((given.reshape(-1, given.shape[-1]).cpu(), chosen.cpu()))

    def spread(self, count: int) -> Tensor:
        """`[n, hidden]`: about so many tokens of all calls, at equal distances."""
        step = -(-sum(len(given) for given, _ in self._calls) // count)
        return torch.cat([given[::step] for given, _ in self._calls])

    def of(self, expert: int) -> Iterator[Tensor]:
        """`[n, hidden]` of each call: the tokens routed to this expert."""
        for given, chosen in self._calls:
            is_routed = (chosen == expert).any(dim=1)
            if bool(is_routed.any()):
                yield given[is_routed]


def find_layer_experts(model: PreTrainedModel) -> list[LayerExperts]:
    """Those whose matrices were left in their files."""
    return [
        LayerExperts(path, module, left)
        for path, module in model.named_modules()
        if (left := left_experts(module))
    ]


def _matrices(left: LeftExperts) -> dict[str, ExpertMatrix]:
    found: dict[str, ExpertMatrix] = {}
    for name, stored in left.stored.items():
        for expert, parts in enumerate(stored.matrices):
            start = 0
            for part in parts:
                if part.expert is not None or not part.name.endswith(".weight"):
                    return {}
                shape = stored.weights[part.name].shape
                found[part.name.removesuffix(".weight")] = ExpertMatrix(name, expert, start, shape)
                start += shape[0]
    return found
