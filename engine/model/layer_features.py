"""What a proposer reads of a forward pass: the hidden states between layers, combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .attention_windows import LayerProbe
from .forward import run_model
from .layer_list import layer_list


class LayerFeatures:
    """Combines the outputs of some layers to one vector per token."""

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        layers: Sequence[int],
        combine: Callable[[Tensor], Tensor],
    ) -> None:
        """`layers`: l means the hidden state after the first l layers, without the final norm.
        `combine`: from these states side by side, `[num_tokens, len(layers) * hidden_size]`, to
        `[num_tokens, size]`. Raises UnsupportedModel if the model has no such layers.
        """
        found = layer_list(model, config)
        if found is None or not layers or not all(1 <= layer <= len(found[1]) for layer in layers):
            raise UnsupportedModel(f"{config.model_type} has no layers {list(layers)}")
        self._modules = [found[1][layer - 1] for layer in layers]
        self._combine = combine

    @contextmanager
    def seen(self) -> Iterator[dict[int, Tensor]]:
        """Collects the layers' outputs of one forward pass inside, for `combined`."""
        outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for index, module in enumerate(self._modules):
                hook = module.register_forward_hook(partial(_keep, outputs, index))
                hooks.callback(hook.remove)
            yield outputs

    def states(self, outputs: dict[int, Tensor]) -> Tensor:
        """`[batch, num_tokens, len(layers) * hidden_size]`."""
        return torch.cat([outputs[index] for index in range(len(self._modules))], dim=-1)

    def combined(self, outputs: dict[int, Tensor]) -> Tensor:
        """`[num_tokens, size]` of a flat forward pass."""
        return self._combine(self.states(outputs)[0])

    def check(self, model: nn.Module, config: Any) -> None:
        """Raises UnsupportedModel if the model's layers do not each give one state per token."""
        zero = torch.zeros(1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with self.seen() as outputs, torch.inference_mode():
                run_model(model, LayerProbe(), zero, zero, zero)
                self.combined(outputs)
        except Exception as exc:  # any error of the model's code means that they cannot be read
            reason = f"the hidden states of {config.model_type} cannot be read between layers"
            raise UnsupportedModel(reason) from exc


def _keep(outputs: dict[int, Tensor], index: int, _module: Any, _args: Any, output: Any) -> None:
    outputs[index] = output[0] if isinstance(output, tuple) else output
