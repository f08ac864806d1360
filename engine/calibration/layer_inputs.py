"""What a layer's linear layers are given: `H = X Xᵀ` of each one's inputs, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class LayerInputs:
    """Sums over all rows that a layer's linear layers have seen.

    Linear layers that read one tensor, such as q, k and v, share its sum.
    """

    def __init__(self) -> None:
        self._leaders: dict[str, str] = {}
        self._hessians: dict[str, Tensor] = {}
        self._sizes: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._last: tuple[str, Tensor] | None = None

    @contextmanager
    def watching(self, linears: Mapping[str, nn.Module]) -> Iterator[None]:
        """Meanwhile add every input of these."""
        with ExitStack() as hooks:
            for name, module in linears.items():
                hook = module.register_forward_pre_hook(self._hook(name))
                hooks.callback(hook.remove)
            yield
        self._last = None

    def hessian(self, name: str, weight: Tensor) -> Tensor:
        """fp32 `[in, in]`: the sum of each row times itself, for a layer with `weight [out, in]`.

        Zeros if it was never called, as an expert may be that no token was routed to.
        """
        found = self._hessians.get(self._leaders.get(name, name))
        if found is None:
            size = weight.shape[1]
            found = torch.zeros(size, size, device=weight.device, dtype=torch.float32)
        return found

    def magnitude(self, name: str) -> Tensor:
        """fp32 `[in]`: the mean size of each input of a linear layer that was called."""
        leader = self._leaders[name]
        return self._sizes[leader] / self._counts[leader]

    def siblings(self) -> list[list[str]]:
        """The linear layers that read one tensor, in the order of their calls."""
        found: dict[str, list[str]] = {}
        for name, leader in self._leaders.items():
            found.setdefault(leader, []).append(name)
        return list(found.values())

    def _hook(self, name: str) -> Any:
        def add(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._add(name, args[0])

        return add

    def _add(self, name: str, inputs: Tensor) -> None:
        is_sibling = self._last is not None and self._last[1] is inputs
        if name not in self._leaders:
            self._leaders[name] = self._last[0] if is_sibling and self._last else name
        if self._leaders[name] != name:
            return
        self._last = (name, inputs)
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        if name not in self._hessians:
            size = rows.shape[1]
            self._hessians[name] = torch.zeros(size, size, device=rows.device, dtype=torch.float32)
            self._sizes[name] = torch.zeros(size, device=rows.device, dtype=torch.float32)
            self._counts[name] = 0
        self._hessians[name].addmm_(rows.T, rows)
        self._sizes[name] += rows.abs().sum(dim=0)
        self._counts[name] += len(rows)
