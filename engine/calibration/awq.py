"""AWQ: scales inputs with large activations up before rounding, and what makes them down.

Lin et al. 2023 (arXiv 2306.00978). `Q(W · s) (x / s)` rounds the columns that matter most with a
smaller error. The division by s is folded into the norm or linear layer before, so serving costs
nothing more. Where that is exact is found by trying it, not by the names of architectures. The
paper's search for clipped weights is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .decoder_walk import Layer
from .grid import Grid, round_to_nearest

_ALPHAS = tuple(step / 20 for step in range(20))
"""The paper's grid; at 0 nothing is scaled."""
_ROWS = 512
"""Of a weight, for which the error of an alpha is computed at most."""
_TOLERANCE = 1e-4
"""Of the largest output: what fp32 rounds."""


class Fold(NamedTuple):
    """Linear layers that read one tensor, and the module that makes it."""

    source: str
    """A norm, or a linear layer that is quantized too, without a bias."""
    readers: tuple[str, ...]


class FoldableLayer:
    """A decoder layer whose weights may be changed in place."""

    def __init__(
        self,
        layer: Layer,
        norms: Mapping[str, nn.Module],
        linears: Mapping[str, nn.Module],
        weights: Mapping[str, Tensor],
    ) -> None:
        """`norms`: modules with a vector of weights. `weights`: the fp32 matrices that the linear
        layers compute with."""
        self._layer = layer
        self._norms = norms
        self._linears = linears
        self._weights = {**weights, **{name: _vector(norm) for name, norm in norms.items()}}

    def folds(self, siblings: Sequence[Sequence[str]], state: Tensor) -> list[Fold]:
        """Those that leave the layer's output for `state` as it is, whatever the scales are."""
        expected = self._layer(state)
        makers = self._makers(siblings, state)
        found = []
        for readers in siblings:
            for source in self._candidates(readers, makers.get(readers[0])):
                fold = Fold(source, tuple(readers))
                if self._is_exact(fold, state, expected):
                    found.append(fold)
                    break
        return found

    def apply(self, fold: Fold, scale: Tensor, dtype: torch.dtype) -> None:
        """Multiply the readers' columns by `scale [in]`, about, and divide what makes them.

        A norm's weights are rounded to dtype, in which they are stored, and the columns are
        multiplied by exactly what that divides by.
        """
        source = self._weights[fold.source]
        if fold.source in self._norms:
            divided = (source / scale).to(dtype).float()
            scale = torch.where(divided != 0, source / divided, 1.0)
            source.copy_(torch.where(divided != 0, divided, source))
        else:
            source /= scale[:, None]
        for reader in fold.readers:
            self._weights[reader] *= scale

    def norm(self, fold: Fold) -> Tensor | None:
        """The weights of the norm that a fold changed; None: it changed a linear layer."""
        return self._weights[fold.source] if fold.source in self._norms else None

    def _makers(self, siblings: Sequence[Sequence[str]], state: Tensor) -> dict[str, str]:
        """The first of each siblings to the norm whose output they read."""
        outputs: list[tuple[str, Tensor]] = []
        found: dict[str, str] = {}

        def keep(name: str, _module: nn.Module, _args: object, output: Tensor) -> None:
            outputs.append((name, output))

        def look(first: str, _module: nn.Module, args: tuple[Tensor]) -> None:
            for name, output in outputs:
                if output is args[0]:
                    found[first] = name

        with ExitStack() as hooks:
            for name, norm in self._norms.items():
                hooks.callback(norm.register_forward_hook(partial(keep, name)).remove)
            for first, *_ in siblings:
                linear = self._linears[first]
                hooks.callback(linear.register_forward_pre_hook(partial(look, first)).remove)
            self._layer(state)
        return found

    def _candidates(self, readers: Sequence[str], norm: str | None) -> Iterator[str]:
        if norm is not None:
            yield norm
            return
        in_features = self._weights[readers[0]].shape[1]
        parent = readers[0].rpartition(".")[0]
        for name, module in self._linears.items():
            is_beside = name.rpartition(".")[0] == parent and name not in readers
            if is_beside and module.bias is None and len(self._weights[name]) == in_features:
                yield name

    def _is_exact(self, fold: Fold, state: Tensor, expected: Tensor) -> bool:
        if not self._weights[fold.source].any():
            return False  # `1 + weight` at its beginning: dividing zeros shows nothing
        changed = {name: self._weights[name].clone() for name in (fold.source, *fold.readers)}
        generator = torch.Generator().manual_seed(0)
        exponents = torch.rand(
            changed[fold.readers[0]].shape[1], generator=generator, dtype=torch.float32
        )
        scale = (2 * exponents - 1).exp2().to(state.device)
        self.apply(fold, scale, torch.float32)
        error = (self._layer(state) - expected).abs().max()
        for name, values in changed.items():
            self._weights[name].copy_(values)
        return bool(error <= _TOLERANCE * expected.abs().max())


def best_scale(
    weights: Sequence[Tensor],
    hessian: Tensor,
    magnitude: Tensor,
    grid: Grid,
    *,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """fp32 `[in]`: `magnitude ** alpha` with the least error of the outputs, by the paper's
    equation 4.

    `weights [out, in]` read the same inputs. `hessian [in, in]`: the sum of each input times
    itself. `magnitude [in]`: the mean sizes of the inputs.
    """
    sampled = [weight[:: -(-len(weight) // _ROWS)] for weight in weights]
    relative = (magnitude / magnitude.mean().clamp(min=1e-12)).clamp(min=1e-4)
    best, least = torch.ones_like(magnitude), torch.inf
    for alpha in _ALPHAS:
        scale = relative**alpha
        scale = scale / (scale.max() * scale.min()).sqrt()
        loss = 0.0
        for weight in sampled:
            rounded = round_to_nearest(weight * scale, grid, group=group, dtype=dtype)
            wrong = rounded.dequantize() / scale - weight
            loss += float((wrong @ hessian * wrong).sum())
        if loss < least:
            best, least = scale, loss
    return best


def _vector(norm: nn.Module) -> Tensor:
    assert isinstance(norm.weight, Tensor)
    return norm.weight.data


def foldable_norms(block: nn.Module, path: str) -> dict[str, nn.Module]:
    """A decoder layer's modules that have one vector of weights and nothing else, by their path."""
    found = {}
    for name, module in block.named_modules(prefix=path):
        parameters = dict(module.named_parameters())
        if parameters.keys() == {"weight"} and parameters["weight"].ndim == 1:
            found[name] = module
    return found
