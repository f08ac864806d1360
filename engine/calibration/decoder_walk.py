"""Runs a model's decoder layer by layer, each over all samples before the next one.

The model's own forward pass of one sample calls the layers, so masks, positions and whatever else
layers are called with are the model's own. All samples have the same length, so this is the same
for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModel

Layer = Callable[[Tensor], Tensor]
"""Hidden states `[1, length, hidden]` to those after the layer."""
_CHECKED_TOKENS = 24
_TOLERANCE = 1e-4
"""Of the largest logit. The same operations on the same tensors: in fp32, they give the same."""


class Visit(Protocol):
    """What is done at a layer."""

    def __call__(self, index: int, layer: Layer, /) -> None: ...


class DecoderWalk:
    """A model in fp32. Raises UnsupportedModel if it has no single list of decoder layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # A loss of training, computed of all layers' routers, which may all be skipped here.
        model.config.output_router_logits = False
        self.path, self.layers = _decoder_layers(model)
        self._giving_tuples: set[int] = set()

    def check(self) -> None:
        """Raise UnsupportedModel if its layers depend on more than hidden states and positions.

        Such a model gives other logits when its layers are called on their own.
        """
        generator = torch.Generator().manual_seed(0)
        size = (2, _CHECKED_TOKENS)
        first, second = torch.randint(self._model.config.vocab_size, size, generator=generator)
        state = self.first_state(second.tolist())

        def visit(_index: int, layer: Layer) -> None:
            nonlocal state
            state = layer(state)

        self.run(first.tolist(), visit)
        expected = self._logits(second.tolist())
        if (self.logits(state) - expected).abs().max() > _TOLERANCE * expected.abs().max():
            raise UnsupportedModel(
                f"{self._model.config.model_type}: its layers cannot be calibrated one by one, as "
                "they need more than the layer before gives; quantize it at load with --quantize"
            )

    def first_state(self, tokens: Sequence[int]) -> Tensor:
        """The hidden states `[1, length, hidden]` that reach the first layer."""

        def stop(_index: int, state: Tensor, _layer: Layer) -> Tensor:
            raise _Reached(state)

        with self._calling(stop):
            try:
                self._logits(tokens)
            except _Reached as reached:
                return reached.state
        raise AssertionError("the model calls its layers")

    def run(self, tokens: Sequence[int], visit: Visit) -> None:
        """Visit each layer in turn. `tokens`: any sample, which only gives its length."""

        def call(index: int, state: Tensor, layer: Layer) -> Tensor:
            visit(index, layer)
            return state

        with self._calling(call):
            self._logits(tokens)

    def logits(self, state: Tensor) -> Tensor:
        """`[length, vocab]` of the hidden states after the last layer."""
        last = len(self.layers) - 1

        def skip(index: int, own: Tensor, _layer: Layer) -> Tensor:
            return state.to(own.device) if index == last else own

        with self._calling(skip):
            return self._logits([0] * state.shape[1])

    @torch.no_grad()
    def _logits(self, tokens: Sequence[int]) -> Tensor:
        input_ids = torch.tensor([tokens], device=self._model.device)
        logits: Tensor = self._model(input_ids=input_ids, use_cache=False).logits
        return logits[0]

    @contextmanager
    def _calling(self, call: Callable[[int, Tensor, Layer], Tensor]) -> Iterator[None]:
        """Meanwhile a layer's output is what `call` returns of its index, input and function."""
        for index, layer in enumerate(self.layers):
            layer.forward = self._replaced(index, layer.forward, call)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward  # that of the class is found again

    def _replaced(
        self,
        index: int,
        forward: Callable[..., Any],
        call: Callable[[int, Tensor, Layer], Tensor],
    ) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            def layer(state: Tensor) -> Tensor:
                if args:
                    output = forward(state, *args[1:], **kwargs)
                else:
                    output = forward(**{**kwargs, "hidden_states": state})
                if not isinstance(output, tuple):
                    return output  # type: ignore[no-any-return]
                self._giving_tuples.add(index)
                return output[0]  # type: ignore[no-any-return]

            output = call(index, args[0] if args else kwargs["hidden_states"], layer)
            return (output,) if index in self._giving_tuples else output

        return replaced


class _Reached(Exception):
    def __init__(self, state: Tensor) -> None:
        self.state = state


def _decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    count = model.config.num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, module
    raise UnsupportedModel(f"{model.config.model_type} has no list of {count} decoder layers")
