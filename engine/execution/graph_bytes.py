"""The device memory of captured decode steps besides their activations."""

from __future__ import annotations

from ..config import EngineConfig
from ..model.layer_subset import drafting_layers
from ..model.rounded_linears import rounded_format
from .decode_graphs import num_graphs_at_start
from .decode_inputs import DecodeLayout

GRAPH_LAYER_BYTES = 256 << 10
"""Device bytes of a graph per layer of the model, in addition to its tensors."""
WORKSPACE_BYTES = 192 << 20
"""Bytes of the matmul library for the streams on which graphs are captured, and of the kernels
loaded for them: with half of it, planned 118 and 195 MiB were actually 212 and 242."""


def num_captured_layers(config: EngineConfig, num_layers: int) -> int:
    """The layers of the graphs of one size, for a base with so many: its own, and once more those
    that its drafts compute. Ranks capture no drafts. Raises InvalidParameter for layers that it
    does not have."""
    num_drafting = sum(map(len, drafting_layers(config, num_layers).values()))
    num_drafting += num_layers if rounded_format(config) is not None else 0
    return num_layers if config.num_ranks > 1 else num_layers + num_drafting


def fixed_graph_bytes(
    config: EngineConfig,
    layout: DecodeLayout,
    *,
    vocab_size: int,
    num_layers: int,
    has_adapters: bool,
) -> int:
    """Of the inputs, the logits and the graphs themselves.

    `num_layers`: see `num_captured_layers`.
    """
    logits = 4 * layout.max_rows * vocab_size
    num_graphs = num_graphs_at_start(config, has_adapters=has_adapters)
    return layout.num_bytes + logits + num_graphs * num_layers * GRAPH_LAYER_BYTES + WORKSPACE_BYTES
