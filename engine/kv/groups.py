"""KV groups: layers with the same attention window share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .layout import KvGroup


class LayerKvShape(NamedTuple):
    """The size of one token's keys and values in one layer; `key_dim` and `value_dim` may
    differ."""

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """The positions that a query sees, including its own; None: all."""
    is_latent: bool = False
    """The values are the first `value_dim` elements of the keys, which alone are stored."""

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
    first.

    A window that no sequence can exceed counts as full attention. `attention_window`,
    `attention_sinks`: the window of full-attention layers, if set.
    """
    members: dict[tuple[int | None, int], list[int]] = {}
    for layer, shape in enumerate(shapes):
        window, sinks = shape.window, 0
        if window is None or window >= max_model_len:
            window, sinks = attention_window, attention_sinks
        if window is None or window >= max_model_len:
            window, sinks = None, 0
        members.setdefault((window, sinks), []).append(layer)
    return tuple(
        KvGroup(tuple(layers), window=window, sinks=sinks, num_blocks=2)
        for (window, sinks), layers in sorted(
            members.items(), key=lambda item: (item[0][0] is not None, item[1])
        )
    )


def one_group(num_layers: int, num_blocks: int) -> tuple[KvGroup, ...]:
    """One group of all layers, without a window."""
    return (KvGroup(tuple(range(num_layers)), window=None, sinks=0, num_blocks=num_blocks),)
