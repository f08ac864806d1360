"""A runner whose model computes nothing: a step is only the host's work on its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from loraplex.adapters.arena import Arena
from loraplex.adapters.layout import BaseLayout
from loraplex.engine.execution.decode_graphs import DecodeGraphs
from loraplex.engine.execution.decode_inputs import DecodeLayout
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.kv.cache import KvCache
from loraplex.engine.kv.layout import KvGroup
from loraplex.engine.model.base_model import BaseModel

RANK = 16
NUM_SLICES = 7 * 32
"""Linear layers of an 8 B model."""


def empty_runner(
    groups: Sequence[KvGroup],
    block_size: int,
    *,
    num_adapters: int,
    graph_rows: int = 0,
    max_model_len: int = 0,
) -> ModelRunner:
    """A runner on the CPU without pages, for adapters of table rows up to `num_adapters`.

    Its steps of up to `graph_rows` tokens, if any, are replayed as graphs; for these,
    `max_model_len`.
    """
    base, cache, arena = _base(), _cache(groups, block_size), _arena(num_adapters)
    graphs = None
    if graph_rows:
        layout = DecodeLayout(tuple(groups), block_size, graph_rows, max_model_len)
        graphs = DecodeGraphs(base, cache, arena, layout, _capture, sizes=[graph_rows])
    return ModelRunner(base, cache, arena, graphs)


def _capture(_compute: Callable[[], None]) -> Callable[[], None]:
    """Neither computes nor replays."""
    return lambda: None


def _model(*, logits_to_keep: Tensor, **_inputs: Any) -> SimpleNamespace:
    return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 1))


def _base() -> BaseModel:
    return cast(
        BaseModel,
        SimpleNamespace(
            model=_model,
            device=torch.device("cpu"),
            layout=BaseLayout("sha256:0", ()),
            head_name=None,
            absorbed=(),
            shared_heads=None,
            num_logits=1,
            forget_step=lambda: None,
        ),
    )


def _cache(groups: Sequence[KvGroup], block_size: int) -> KvCache:
    spare_blocks = [group.num_blocks for group in groups]
    return cast(
        KvCache,
        SimpleNamespace(groups=tuple(groups), block_size=block_size, spare_blocks=spare_blocks),
    )


def _arena(num_adapters: int) -> Arena:
    num_rows = num_adapters + 1
    return cast(
        Arena,
        SimpleNamespace(
            flat=torch.zeros(1),
            table=torch.zeros(1),
            row_tables=[[(0, 0, RANK)] * NUM_SLICES] * num_rows,
            row_auxiliary=[{}] * num_rows,
            replacing_rows=set(),
            row_vocabularies={},
            capacity=1,
        ),
    )
