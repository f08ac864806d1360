"""Reads each layer's attention window from the masks that transformers builds.

Some families pass a window to the attention function, some build it only into the mask, and the
names of the settings differ. transformers' eager attention uses the mask. So a few tokens run with
an attention implementation, `PROBE_NAME`, for which transformers builds masks, and each mask is
evaluated as a function of positions up to the longest supported sequence. Serving uses another
name, for which no mask is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...kernels.attention import AttentionOptions
from ...kernels.attention_window import AttentionWindow
from ...kernels.lora_batch import LoraBatch
from ..errors import UnsupportedModel
from ..kv.groups import LayerKvShape
from .forward import attention, current_forward
from .step_states import ProbedStates

PROBE_NAME = "loraplex_probe"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Arguments: a batch index, a head, a query's position and a key's; whether the query sees the
key."""


class LayerProbe:
    """A forward pass that stores nothing: it records which layers attend, their windows, and which
    layers have states."""

    def __init__(self, max_model_len: int = 0) -> None:
        """`max_model_len`: the longest sequence whose masks matter; 0 if no mask is built."""
        self.lora: LoraBatch | None = None
        self.is_captured = False
        self.states = ProbedStates()
        self.rotary_rows: Tensor | None = None
        self.calls: list[int] = []
        """The layers that attend, in the order in which they do."""
        self._attention: dict[int, LayerKvShape] = {}
        self.window: AttentionWindow | None = None
        """The window of the layer that attends next."""
        self._max_model_len = max_model_len
        self._masks: list[tuple[Tensor, Callable[[], AttentionWindow | None]]] = []

    def attend(
        self, layer_index: int, q: Tensor, k: Tensor, v: Tensor | int, options: AttentionOptions
    ) -> Tensor:
        self.calls.append(layer_index)
        value_dim = v if isinstance(v, int) else v.shape[2]
        self._attention[layer_index] = LayerKvShape(
            k.shape[1],
            k.shape[2],
            value_dim,
            self.window,
            is_latent=isinstance(v, int),
            has_slopes=options.slopes is not None,
        )
        return q.new_zeros(*q.shape[:2], value_dim)

    def shapes(self, num_layers: int) -> list[LayerKvShape]:
        """What each layer caches."""
        nothing = LayerKvShape(0, 0, 0)
        return [
            self._attention.get(layer, nothing)._replace(
                states=tuple(self.states.shapes.get(layer, ()))
            )
            for layer in range(num_layers)
        ]

    def stand_in(self, mask_function: MaskFunction) -> Tensor:
        """The placeholder that the model passes on as the mask described by this function."""
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        # Evaluated once, and only if a layer uses it: some families build masks that none of their
        # layers uses.
        self._masks.append((mask, cache(partial(read_window, mask_function, self._max_model_len))))
        return mask

    def window_of(self, mask: Tensor | None) -> AttentionWindow | None:
        """The window of a layer that gets this mask.

        Raises UnsupportedModel for a mask that the model built or changed itself, and for one that
        is neither causal nor a window.
        """
        if mask is None:
            return None
        for stand_in, window in self._masks:
            if stand_in is mask:
                return window()
        raise UnsupportedModel("its attention depends on its own mask")


def read_window(mask_function: MaskFunction, max_model_len: int) -> AttentionWindow | None:
    """The window of this mask; None for full causal attention.

    Raises UnsupportedModel for any other pattern in sequences of up to `max_model_len` tokens.
    """
    positions = torch.arange(max_model_len)
    size = int(_seen(mask_function, positions, 0).sum())
    window = None
    if size < max_model_len:
        # The first query that does not see position 0 sees position 1, unless a chunk begins.
        is_chunked = size > 1 and not _seen(mask_function, size, 1)
        window = AttentionWindow(max(size, 1), bool(is_chunked))
    for query in _sampled_positions(max_model_len, window):
        first = 0 if window is None else window.first_visible(query)
        expected = (positions <= query) & (positions >= first)
        if not torch.equal(_seen(mask_function, query, positions), expected):
            raise UnsupportedModel("its attention mask is neither causal nor a window")
    return window


def _seen(mask_function: MaskFunction, queries: Tensor | int, keys: Tensor | int) -> Tensor:
    """bool `[num_queries or num_keys]`: which queries see one key, or which keys one query sees."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    places = [zero + torch.as_tensor(places) for places in (queries, keys)]
    seen = mask_function(zero, zero, *places)
    return seen.expand(1, 1, 1, max(place.numel() for place in places))[0, 0, 0]


def _sampled_positions(max_model_len: int, window: AttentionWindow | None) -> list[int]:
    """Both ends, every power of two and some of the window's borders, each with its neighbors."""
    size = 1 if window is None else window.size
    powers = [2**exponent for exponent in range(max_model_len.bit_length())]
    borders = [size * power for power in powers] + [max_model_len // size * size]
    near = {place + offset for place in (*powers, *borders) for offset in (-1, 0, 1)}
    return sorted(place for place in (*near, max_model_len - 1) if 0 <= place < max_model_len)


def _running_probe() -> LayerProbe:
    probe = current_forward.get()
    assert isinstance(probe, LayerProbe), f"{PROBE_NAME} runs under a LayerProbe"
    return probe


def _probe_mask(*, mask_function: MaskFunction, use_vmap: bool = False, **_others: Any) -> Tensor:
    """transformers calls this instead of building a mask."""
    probe = _running_probe()
    if use_vmap:  # with a function of the model's own, which takes single indices
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return probe.stand_in(mask_function)


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    probe = _running_probe()
    probe.window = probe.window_of(attention_mask)
    return attention(module, query, key, value, None, **others)


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(PROBE_NAME, _probe_mask)
