"""Tokens' positions, for layers that take them from the length of transformers' cache.

Llama 4 scales the queries of its layers without rotary embedding by their positions, which it
counts from the number of tokens in the cache. A served step has tokens of many sequences, and no
such cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .forward import current_forward

_LAYERS = frozenset({"Llama4TextDecoderLayer"})
"""The names of classes that call such layers, and know the positions."""


class StepPositions:
    """Stands for transformers' cache: no length, but the distance of each token from its row."""

    def __init__(self, position_ids: Tensor) -> None:
        """position_ids: `[1, num_tokens]`."""
        self._positions = position_ids[0]

    def get_seq_length(self, _layer_index: int) -> Tensor:
        """int64 `[num_tokens]`: what the layer adds to the rows of the tokens."""
        rows = torch.arange(len(self._positions), device=self._positions.device)
        return self._positions - rows

    def update(
        self, keys: Tensor, values: Tensor, _layer_index: int, **_others: Any
    ) -> tuple[Tensor, Tensor]:
        """The step's own: those before are in Loraplex's cache."""
        return keys, values


def give_positions(model: nn.Module) -> None:
    """Let such layers of the model have the positions of a served step."""
    for module in model.modules():
        if type(module).__name__ in _LAYERS:
            module.register_forward_pre_hook(_give, with_kwargs=True)


def _give(_layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if current_forward.get() is not None:
        kwargs["cache"] = StepPositions(kwargs["position_ids"])
    return args, kwargs
