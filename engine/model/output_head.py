"""The output head: it runs on the logits rows only, so its adapter rows differ from the step's.

The head module remains unchanged and unquantized, and may be tied to the input embedding; a hook
changes its result. The model's own operations on logits (caps, scales) follow after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapters.arena import Arena
from ...adapters.layout import Projection, Slice
from ...kernels.linear import row_norms
from .forward import current_forward
from .linear_adapters import LinearAdapters


class OutputHead:
    """The model's own head, with the adapters' changes added."""

    def __init__(self, name: str, module: nn.Linear) -> None:
        self.projection = Projection((Slice(name, module.in_features, module.out_features),))
        self.base_weights = HeadWeights(module)
        self._adapters: LinearAdapters | None = None
        module.register_forward_hook(self._change)

    def attach(self, arena: Arena, slice_range: range) -> None:
        self._adapters = LinearAdapters(self.projection, self.base_weights, arena, slice_range)

    def forget_adapter(self, row: int) -> None:
        if self._adapters:
            self._adapters.forget(row)

    def forget_step(self) -> None:
        """It keeps nothing between steps."""

    def _change(self, _module: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        step = current_forward()
        if self._adapters and step and step.head_lora:
            x: Tensor = args[0]
            self._adapters.add(x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), step.head_lora)


@contextmanager
def head_inputs(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects the inputs of the model's output head: `[1, num_rows, hidden_size]` for each forward
    pass of a model whose head `model_ends` adapts."""
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        hook.remove()


class HeadWeights:
    """The head's weight, as BaseWeights."""

    def __init__(self, module: nn.Linear) -> None:
        self._weight = module.weight.detach()
        self.bias = None if module.bias is None else module.bias.detach()

    @cached_property
    def row_norms(self) -> Tensor:
        return row_norms(self._weight)

    def products(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight).float()
