"""KV groups: layers with the same attention window share a block table, and so do the states of
all layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ...kernels.attention_window import AttentionWindow
from .layout import STATE_WINDOW, KvGroup

if TYPE_CHECKING:
    import torch


class StateShape(NamedTuple):
    """What a sequence of any length has of one convolution or recurrence of a layer."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


class LayerKvShape(NamedTuple):
    """What one layer caches: the size of one token's keys and values, and the states of a sequence.

    `key_dim` and `value_dim` may differ; they are 0 in a layer without attention.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: AttentionWindow | None = None
    """The positions that a query sees; None: all."""
    is_latent: bool = False
    """The values are the first `value_dim` elements of the keys, which alone are stored."""
    has_slopes: bool = False
    """A key's logit depends on its distance from the query (ALiBi)."""
    states: tuple[StateShape, ...] = ()
    """In the order in which the layer computes them."""

    @property
    def attends(self) -> bool:
        return self.key_dim > 0

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The sizes of the vectors that are stored for a token and head."""
        return (self.key_dim,) if self.is_latent else (self.key_dim, self.value_dim)


def group_layers(
    shapes: Sequence[LayerKvShape],
    *,
    max_model_len: int,
    attention_window: int | None = None,
    attention_sinks: int = 0,
) -> tuple[KvGroup, ...]:
    """The KV groups of layers by window, each with the smallest possible pool; full attention
    first, states last.

    A window that no sequence can exceed counts as full attention. `attention_window`,
    `attention_sinks`: the window of full-attention layers, if set.
    """
    limit = None if attention_window is None else AttentionWindow(attention_window)
    members: dict[tuple[AttentionWindow | None, int], list[int]] = {}
    for layer, shape in enumerate(shapes):
        if not shape.attends:
            continue
        window, sinks = shape.window, 0
        if window is None or window.size >= max_model_len:
            window, sinks = limit, attention_sinks
        if window is None or window.size >= max_model_len:
            window, sinks = None, 0
        members.setdefault((window, sinks), []).append(layer)
    groups = [
        KvGroup(tuple(layers), window=window, sinks=sinks, num_blocks=2)
        for (window, sinks), layers in sorted(
            members.items(), key=lambda item: (item[0][0] is not None, item[1])
        )
    ]
    return (*groups, *_state_groups(shapes, num_blocks=2))


def _state_groups(shapes: Sequence[LayerKvShape], num_blocks: int) -> list[KvGroup]:
    """The group of all states; none if no layer has any."""
    layers = tuple(layer for layer, shape in enumerate(shapes) if shape.states)
    if not layers:
        return []
    return [KvGroup(layers, window=STATE_WINDOW, sinks=0, num_blocks=num_blocks, holds_states=True)]


def simple_groups(shapes: Sequence[LayerKvShape], num_blocks: int) -> tuple[KvGroup, ...]:
    """One group of all layers that attend, without a window, and one of all states."""
    layers = tuple(layer for layer, shape in enumerate(shapes) if shape.attends)
    attending = [KvGroup(layers, window=None, sinks=0, num_blocks=num_blocks)] if layers else []
    return (*attending, *_state_groups(shapes, num_blocks))


def one_group(num_layers: int, num_blocks: int) -> tuple[KvGroup, ...]:
    """One group of all layers, without a window."""
    return (KvGroup(tuple(range(num_layers)), window=None, sinks=0, num_blocks=num_blocks),)
