"""Tables of cosines and sines, for rotary embeddings whose frequencies depend on the length.

transformers chooses the frequencies for a whole forward pass. Requests of different rotary contexts
(`rope`) share steps, so each row of a step reads the tables of its own request's context. The
tables hold what transformers' module itself computes of a sequence of that context's length.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModel
from .forward import current_forward
from .rope import RotaryContexts, depends_on_length

Tables = dict[str | None, tuple[Tensor, ...]]
"""By layer type, None for all: cosines and sines `[num_rows, dim]` each."""


class TabledForward:
    """Stands for the forward of a rotary embedding.

    In the steps of served models it reads tables. Everything else, such as a dense reference, gets
    the module's own forward, and so does a layer type with fixed frequencies.
    """

    def __init__(self, own: Callable[..., Any], contexts: RotaryContexts, tables: Tables) -> None:
        self.contexts = contexts
        self.tables = tables
        self._own = own

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        step, tables = current_forward.get(), self.tables.get(layer_type)
        if step is None or tables is None:
            return self._own(x, position_ids, *_given(layer_type))
        # Without rows, all requests of the step have the first context, which begins at row 0.
        rows = position_ids[0] if step.rotary_rows is None else step.rotary_rows
        return tuple(table[rows][None] for table in tables)


def table_rotary(
    model: nn.Module, contexts: RotaryContexts, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Let the rotary embeddings of a model whose hidden states have this dtype read tables, if
    their frequencies depend on the length; returns the bytes of the tables.

    Raises UnsupportedModel if the tables cannot be made.
    """
    if not contexts.has_tables:
        return 0
    like, num_bytes = torch.empty(0, dtype=dtype, device=device), 0
    for module in list(model.modules()):
        if layer_types := _layer_types(module):
            tables = {kind: _tables(module, contexts, like, kind) for kind in layer_types}
            module.__dict__["forward"] = TabledForward(module.forward, contexts, tables)
            num_bytes += sum(part.nbytes for parts in tables.values() for part in parts)
    if not num_bytes:
        raise UnsupportedModel(
            f"its rotary embedding, which depends on the length, was not found: give "
            f"--max-model-len {contexts.lengths[0]}"
        )
    return num_bytes


def contexts_of(model: nn.Module) -> RotaryContexts | None:
    """The contexts of a model's tables; None: it has none."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return next(
        (forward.contexts for forward in forwards if isinstance(forward, TabledForward)), None
    )


def _layer_types(module: nn.Module) -> list[str | None]:
    """For which types of layers the module's frequencies depend on the length; None: for all."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return [layer_type for layer_type, kind in kinds.items() if depends_on_length(kind)]
    return [None] if depends_on_length(kinds) else []


def _tables(
    module: nn.Module, contexts: RotaryContexts, like: Tensor, layer_type: str | None
) -> tuple[Tensor, ...]:
    own = deepcopy(module)  # a dynamic rope remembers the longest sequence that it has seen
    computed: list[tuple[Tensor, ...]] = []
    for length in contexts.lengths:
        positions = torch.arange(length, device=like.device)[None]
        with torch.inference_mode():
            computed.append(own(like, positions, *_given(layer_type)))
    parts = zip(*computed, strict=True)
    return tuple(torch.cat([context[0] for context in part]) for part in parts)


def _given(layer_type: str | None) -> tuple[str, ...]:
    """The argument of modules that tell layer types apart."""
    return () if layer_type is None else (layer_type,)
