"""The output head: it runs on the logits rows only, so its adapter rows differ from the step's.

The head may be tied to the input embedding. In a step whose adapters change it, a hook changes its
result. The model's own operations on logits (caps, scales) follow after that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...adapters.arena import Arena
from ...adapters.layout import Projection, Slice
from ...kernels.linear import Linear, row_norms
from ...kernels.linear_packing import choose_linear, pack_linear
from ...kernels.lora_batch import LoraBatch
from ..shards.vocabulary_plan import VocabularyPart
from .adapted_module import BaseWeights, replace_module
from .linear import LinearAdapters
from .row_matrix import RowMatrix


class OutputHead:
    """The model's own head, with the adapters' changes added."""

    num_added: int
    """In a step: the columns of its result beyond the base's tokens."""

    def __init__(self, name: str, module: nn.Linear, *, part: VocabularyPart | None = None) -> None:
        """part: the tokens whose rows it has; None: all."""
        self.projection = Projection((Slice(name, module.in_features, module.out_features),))
        self.base_weights: BaseWeights = HeadWeights(module)
        self.name = name
        self._module: nn.Module = module
        self._adapters: LinearAdapters | None = None
        self.is_divided = part is not None
        """Whether each rank has the rows of some tokens."""
        self._adds_tokens = part is None or part.is_last
        self.num_added = 0

    @property
    def is_partial(self) -> bool:
        """Every rank has all of the head's inputs."""
        return False

    def pack(self, model: nn.Module) -> Linear:
        """Replace the head in the model by one that stores its weight as the device multiplies it
        fastest. A table that was tied to the head keeps its own copy."""
        weights = self.base_weights
        assert isinstance(weights, HeadWeights), "it is packed once"
        weight = weights.weight
        kind = choose_linear(weight, dtype=weight.dtype, device_type=weight.device.type)
        if isinstance(weight, RowMatrix) and not kind.is_packed_by_rows:
            weight = weight.whole()
        packed = pack_linear(weight, weights.bias)
        self.multiply_by(packed, model)
        return packed

    def multiply_by(self, linear: Linear, model: nn.Module) -> None:
        """Let the model have this layer as its head."""
        replace_module(model, self.name, linear)
        self._module = self.base_weights = linear

    @contextmanager
    def replaced_by(self, linear: Linear, model: nn.Module) -> Iterator[None]:
        """Inside, the model has this layer as its head, with the adapters' changes to the base's
        own."""
        served = self._module
        replace_module(model, self.name, linear)
        self._module = linear
        try:
            yield
        finally:
            replace_module(model, self.name, served)
            self._module = served

    def attach(self, arena: Arena, slice_range: range) -> None:
        self._adapters = LinearAdapters(self.projection, self.base_weights, arena, slice_range)

    def forget_adapter(self, row: int) -> None:
        if self._adapters:
            self._adapters.forget(row)

    def forget_step(self) -> None:
        """It keeps nothing between steps."""

    @contextmanager
    def changed_by(self, batch: LoraBatch | None, num_added: int = 0) -> Iterator[None]:
        """Inside, the head's results have the changes of this step's adapters, by logits row; None:
        no adapter changes what this rank has. `num_added`: further columns, for tokens that
        adapters add."""
        hook = None
        if batch is not None:
            hook = self._module.register_forward_hook(
                lambda _module, args, y: self._changed(args[0], y, batch)
            )
        self.num_added = num_added
        try:
            yield
        finally:
            self.num_added = 0
            if hook is not None:
                hook.remove()

    def _changed(self, x: Tensor, y: Tensor, batch: LoraBatch) -> Tensor:
        assert self._adapters is not None, "adapters need an arena"
        rows, vocab_size = x.reshape(-1, x.shape[-1]), y.shape[-1]
        self._adapters.add(rows, y.view(-1, vocab_size), batch)
        if not (self.num_added and self._adds_tokens):
            return y
        added = self._adapters.added_logits(rows, vocab_size, batch, self.num_added)
        return torch.cat([y, added.view(*y.shape[:-1], self.num_added)], dim=-1)


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
        self._module = module
        self.bias = None if module.bias is None else module.bias.detach()

    @property
    def weight(self) -> Tensor:
        return self._module.weight.detach()

    @cached_property
    def row_norms(self) -> Tensor:
        return row_norms(self.weight)

    def products(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).float()
