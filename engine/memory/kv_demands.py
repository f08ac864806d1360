"""The demand of each KV group, of a base that is loaded and of one that is not."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import EngineConfig
from ..kv.cache import KvFormat, kv_bytes_per_block, open_bytes_per_slot
from ..kv.groups import LayerKvShape, group_layers
from ..kv.layout import KvGroup
from ..kv.open_slots import num_open_slots
from .kv_budget import KvDemand


def kv_groups(
    config: EngineConfig, shapes: Sequence[LayerKvShape], *, max_model_len: int
) -> tuple[KvGroup, ...]:
    """The KV groups of a base's layers, each with the smallest possible pool."""
    return group_layers(
        shapes,
        max_model_len=max_model_len,
        attention_window=config.attention_window,
        attention_sinks=config.attention_sinks,
    )


def kv_demands(
    config: EngineConfig,
    groups: Sequence[KvGroup],
    shapes_of_stages: Sequence[Sequence[LayerKvShape]],
    kv_format: KvFormat,
    *,
    max_model_len: int,
    device_type: str,
) -> tuple[KvDemand, ...]:
    """By KV group. `shapes_of_stages`: by stage, what each layer of the base caches on one of its
    ranks."""
    num_slots = None
    if kv_format.bits is not None:
        num_slots = num_open_slots(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.kv_block_size,
            num_steps=num_steps_in_flight(config, device_type),
        )
    return tuple(
        KvDemand(
            config,
            group,
            block_bytes(config, group, shapes_of_stages, kv_format),
            max_model_len,
            num_open_slots=num_slots,
            bytes_per_open_slot=open_bytes_per_slot(
                group,
                shapes_of_stages[0],
                block_size=config.kv_block_size,
                kv_format=kv_format,
            ),
        )
        for group in groups
    )


def block_bytes(
    config: EngineConfig,
    group: KvGroup,
    shapes_of_stages: Sequence[Sequence[LayerKvShape]],
    kv_format: KvFormat,
) -> int:
    """Of the stage that has most: the blocks of a sequence are the same in every stage."""
    return max(
        kv_bytes_per_block(group, shapes, block_size=config.kv_block_size, kv_format=kv_format)
        for shapes in shapes_of_stages
    )


def num_steps_in_flight(config: EngineConfig, device_type: str) -> int:
    """The most steps at once: with asynchronous scheduling one is scheduled before one is read."""
    is_async = config.async_scheduling
    if is_async is None:
        is_async = device_type == "cuda"
    return max(2 if is_async else 1, config.pipeline_parallel_size)
